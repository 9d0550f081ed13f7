"""What Triton has no word for, in PTX: counting and moving by index in shared memory.

Triton's tensors are moved by layouts, or gathered by index; threads cannot count into shared memory
at an address of their own, nor put a value there. Each text here is one `inline_asm_elementwise` of
a whole tile: all elements that a thread holds are its operands (`pack`), and it does not matter
which these are, for the place of each in the tile, its slot, is an operand too. The interpreter
knows no PTX: `sort_gpu.py` and `histogram_gpu.py` say the same in Triton for it.

Shared memory is declared within the text. Threads meet at barrier 0, as Triton's own do. Look-backs
are here too: one warp walks with votes and plain loads, where Triton would have all threads of a
program meet at each turn.
"""

from functools import cache

import torch

KINDS = {torch.float64: "f64", torch.float32: "f32", torch.int64: "s64", torch.int32: "s32"}
"""What PTX calls the dtypes of sums."""


class _Text:
    """PTX with operands by name: outputs first, then inputs, then addresses, `items` of each."""

    def __init__(
        self, outputs: list[str], inputs: list[str], items: int, addresses: tuple[str, ...] = ()
    ) -> None:
        self.names = {name: i * items for i, name in enumerate([*outputs, *inputs, *addresses])}
        self.constraints = ",".join(
            ["=&r"] * (len(outputs) * items)
            + ["r"] * (len(inputs) * items)
            + ["l"] * (len(addresses) * items)
        )
        self.lines: list[str] = []

    def add(self, *lines: str) -> None:
        self.lines += lines

    def of(self, name: str, k: int) -> str:
        return f"${self.names[name] + k}"

    def done(self) -> tuple[str, str]:
        return "{\n" + "\n".join(line + ";" for line in self.lines) + "\n}", self.constraints


@cache
def tally(bins: int, fields: int, warps: int, items: int) -> tuple[str, str]:
    """(text, constraints): how often each bin occurs in a tile.

    Inputs: the slot of each element; `fields` bins, below 0 where it is not counted. Output: at
    slot f * bins + b, how often bin b occurs as field f; at later slots nothing of use.
    """
    inputs = ["slot"] + [f"bin{f}" for f in range(fields)]
    text = _Text(["count"], inputs, items)
    threads, words = 32 * warps, fields * bins
    text.add(
        f".shared .align 16 .b8 counted[{4 * words}]", ".reg .b32 base, mine, at, none",
        ".reg .pred is", "mov.u32 base, counted", "mov.u32 mine, %tid.x", "mov.u32 none, 0",
    )  # fmt: skip
    for begin in range(0, words, threads):
        text.add(
            f"add.u32 at, mine, {begin}", f"setp.lt.u32 is, at, {words}", "shl.b32 at, at, 2",
            "add.u32 at, at, base", "@is st.shared.u32 [at], none",
        )  # fmt: skip
    text.add("bar.sync 0")
    for k in range(items):
        for f in range(fields):
            text.add(
                f"setp.ge.s32 is, {text.of(f'bin{f}', k)}, 0",
                f"shl.b32 at, {text.of(f'bin{f}', k)}, 2", "add.u32 at, at, base",
                f"@is red.shared.add.u32 [at+{4 * f * bins}], 1",
            )  # fmt: skip
    text.add("bar.sync 0")
    for k in range(items):
        text.add(
            f"setp.lt.u32 is, {text.of('slot', k)}, {words}",
            f"shl.b32 at, {text.of('slot', k)}, 2", "add.u32 at, at, base",
            f"mov.u32 {text.of('count', k)}, 0", f"@is ld.shared.u32 {text.of('count', k)}, [at]",
        )  # fmt: skip
    text.add("bar.sync 0")
    return text.done()


@cache
def split(words: int, warps: int, items: int) -> tuple[str, str]:
    """(text, constraints): a tile in the order of its digits, equal ones in the order of slots.

    Inputs: the slot of each element, a digit of 0..255, `words` 32-bit words that go along.
    Outputs: at slot d, how many elements have digit d; at each slot, the words of the element that
    comes there. At least 8 warps.

    A warp takes a stretch of slots, 32 at a time. Votes on the 8 bits of a digit leave a mask of
    its equals; their count so far in the stretch is kept in shared memory, a counter a digit and
    warp. Counters added up over warps and digits are where each element goes.
    """
    inputs = ["slot", "digit"] + [f"word{w}" for w in range(words)]
    text = _Text(["count"] + [f"moved{w}" for w in range(words)], inputs, items)
    size = 32 * warps * items
    text.add(
        f".shared .align 16 .b8 tile[{4 * size}]", f".shared .align 16 .b8 seen[{512 * warps}]",
        ".shared .align 16 .b8 sums[64]", ".shared .align 16 .b8 begins[1024]",
        ".shared .align 16 .b8 totals[1024]",
        ".reg .b32 buffer, counters, mine, lane, warp, lower, at, mask, votes, bit, old, more",
        ".reg .b32 none, total, begin, part", f".reg .b32 d<{items}>, rank<{items}>",
        ".reg .pred is, first, low",
        "mov.u32 buffer, tile", "mov.u32 mine, %tid.x", "mov.u32 none, 0",
        "and.b32 lane, mine, 31", "shr.u32 warp, mine, 5",
        "mov.u32 lower, 1", "shl.b32 lower, lower, lane", "sub.u32 lower, lower, 1",
        # Each warp's counters are cleared; digits go to shared memory, for warps to take in order.
        "mov.u32 counters, seen", "shl.b32 at, mine, 4", "add.u32 at, at, counters",
        "st.shared.v4.u32 [at], {none, none, none, none}",
        "shl.b32 at, warp, 9", "add.u32 counters, counters, at",
    )  # fmt: skip
    for k in range(items):
        text.add(
            f"add.u32 at, buffer, {text.of('slot', k)}", f"st.shared.u8 [at], {text.of('digit', k)}"
        )
    text.add("bar.sync 0", f"mul.lo.u32 at, warp, {32 * items}", "add.u32 at, at, lane",
             "add.u32 at, at, buffer")  # fmt: skip
    text.add(*(f"ld.shared.u8 d{k}, [at+{32 * k}]" for k in range(items)))
    for k in range(items):
        text.add("mov.u32 mask, -1")
        for b in range(8):
            text.add(
                f"and.b32 bit, d{k}, {1 << b}", "setp.ne.u32 is, bit, 0",
                "vote.sync.ballot.b32 votes, is, -1", "@!is not.b32 votes, votes",
                "and.b32 mask, mask, votes",
            )  # fmt: skip
        text.add(
            "and.b32 bit, mask, lower", f"popc.b32 rank{k}, bit", "popc.b32 more, mask",
            f"setp.eq.u32 first, rank{k}, 0",
            f"shl.b32 at, d{k}, 1", "add.u32 at, at, counters",
            "ld.shared.u16 old, [at]", "bar.warp.sync -1", "add.u32 more, more, old",
            "@first st.shared.u16 [at], more", "bar.warp.sync -1", f"add.u32 rank{k}, rank{k}, old",
        )  # fmt: skip
    # Thread d adds up digit d's counters, of one warp after another; then all digits' totals.
    text.add("bar.sync 0", "setp.lt.u32 low, mine, 256", "mov.u32 total, 0", "mov.u32 old, 0",
             "mov.u32 at, seen", "shl.b32 bit, mine, 1", "add.u32 at, at, bit")  # fmt: skip
    for w in range(warps):
        text.add(
            f"@low ld.shared.u16 old, [at+{512 * w}]", f"@low st.shared.u16 [at+{512 * w}], total",
            "add.u32 total, total, old",
        )  # fmt: skip
    text.add("mov.u32 begin, total")
    for step in (1, 2, 4, 8, 16):
        text.add(
            f"shfl.sync.up.b32 part|is, begin, {step}, 0, -1", "@is add.u32 begin, begin, part"
        )
    text.add(
        "setp.eq.u32 first, lane, 31", "mov.u32 old, sums", "shl.b32 at, warp, 2",
        "add.u32 at, at, old", "setp.lt.u32 is, warp, 8", "and.pred first, first, is",
        "@first st.shared.u32 [at], begin", "bar.sync 0", "sub.u32 begin, begin, total",
    )  # fmt: skip
    for w in range(7):
        text.add(
            f"ld.shared.u32 part, [old+{4 * w}]", f"setp.gt.u32 is, warp, {w}",
            "@is add.u32 begin, begin, part",
        )  # fmt: skip
    text.add(
        "shl.b32 at, mine, 2", "mov.u32 old, begins", "add.u32 part, at, old",
        "@low st.shared.u32 [part], begin", "mov.u32 more, totals", "add.u32 part, at, more",
        "@low st.shared.u32 [part], total", "bar.sync 0",
        f"mul.lo.u32 bit, warp, {64 * items}", "shl.b32 at, lane, 1", "add.u32 bit, bit, at",
        "add.u32 bit, bit, buffer",
    )  # fmt: skip
    for k in range(items):
        text.add(
            f"shl.b32 at, d{k}, 1", "add.u32 at, at, counters", "ld.shared.u16 part, [at]",
            f"shl.b32 at, d{k}, 2", "add.u32 at, at, old", "ld.shared.u32 begin, [at]",
            f"add.u32 rank{k}, rank{k}, part", f"add.u32 rank{k}, rank{k}, begin",
            f"st.shared.u16 [bit+{64 * k}], rank{k}",
        )  # fmt: skip
    # Where elements go is known by slot; each thread learns it of those that it holds.
    text.add("bar.sync 0")
    for k in range(items):
        text.add(
            f"shl.b32 at, {text.of('slot', k)}, 1", "add.u32 at, at, buffer",
            f"ld.shared.u16 rank{k}, [at]", f"shl.b32 rank{k}, rank{k}, 2",
            f"add.u32 rank{k}, rank{k}, buffer",
            f"setp.lt.u32 is, {text.of('slot', k)}, 256", f"shl.b32 at, {text.of('slot', k)}, 2",
            "add.u32 at, at, more", f"mov.u32 {text.of('count', k)}, 0",
            f"@is ld.shared.u32 {text.of('count', k)}, [at]",
        )  # fmt: skip
    for w in range(words):
        text.add("bar.sync 0")
        text.add(
            *(f"st.shared.u32 [rank{k}], {text.of(f'word{w}', k)}" for k in range(items)),
            "bar.sync 0",
        )
        for k in range(items):
            text.add(
                f"shl.b32 at, {text.of('slot', k)}, 2", "add.u32 at, at, buffer",
                f"ld.shared.u32 {text.of(f'moved{w}', k)}, [at]",
            )  # fmt: skip
    text.add("bar.sync 0")
    return text.done()


_IDENTITY = {
    ("sum", "s32"): 0, ("max", "s32"): 1 << 31, ("min", "s32"): (1 << 31) - 1,
    ("sum", "s64"): 0, ("max", "s64"): 1 << 63, ("min", "s64"): (1 << 63) - 1,
    ("sum", "f32"): 0, ("max", "f32"): 0xFF800000, ("min", "f32"): 0x7F800000,
    ("sum", "f64"): 0, ("max", "f64"): 0xFFF << 52, ("min", "f64"): 0x7FF << 52,
}  # fmt: skip
"""Bits of what changes nothing."""


def _combine(op: str, kind: str) -> list[str]:
    """sum = op(sum, part)."""
    if op == "sum":
        return [f"add.{kind} sum, sum, part"]
    if kind == "f64":
        return ["setp.nan.f64 is, sum, part", f"{op}.f64 sum, sum, part",
                "@is mov.b64 sum, 0x7FF8000000000000"]  # fmt: skip
    return [f"{op}{'.NaN' if kind == 'f32' else ''}.{kind} sum, sum, part"]


_WALK_REGISTERS = (
    ".reg .b32 left, two, status, other, prefixes, missing, nearer, wanted, bit, low, high",
    ".reg .b64 at, word, more", ".reg .pred is, there, rest",
)  # fmt: skip


def _walk(op: str, kind: str) -> list[str]:
    """A warp walks back over states (`_triton.py`) to the nearest prefix: to `sum`, what all tiles
    before come to, the same for all lanes.

    Wants: `lane`, `at`, the address of the state that is lane + 1 tiles before, `left`, how many
    tiles are before, the first of which publishes a prefix at once; `sum` and `part` of the kind's
    size. A lane adds up what it meets; lanes meet at the end.
    """
    wide = kind.endswith("64")
    size = "b64" if wide else "b32"
    identity = _IDENTITY[op, kind]
    lines = ["mov.u32 two, 2", f"mov.{size} sum, {identity}", "NEXT: setp.lt.s32 there, lane, left"]
    if wide:
        lines += [
            "READ: mov.b64 word, {two, two}", "mov.b64 more, word",
            "@there ld.relaxed.gpu.global.u64 word, [at]",
            "@there ld.relaxed.gpu.global.u64 more, [at+8]",
            "mov.b64 {low, status}, word", "mov.b64 {high, other}, more",
            "mov.b64 part, {low, high}", f"@!there mov.b64 part, {identity}",
            # Two words of unlike status: in the middle of an update.
            "setp.ne.u32 is, status, other", "@is mov.u32 status, 0",
        ]  # fmt: skip
    else:
        lines += [
            "READ: mov.b64 word, {two, two}", "@there ld.relaxed.gpu.global.u64 word, [at]",
            "mov.b64 {part, status}, word", f"@!there mov.b32 part, {identity}",
        ]  # fmt: skip
    lines += [
        "setp.eq.u32 is, status, 2", "vote.sync.ballot.b32 prefixes, is, -1",
        "setp.eq.u32 is, status, 0", "vote.sync.ballot.b32 missing, is, -1",
        # The lanes nearer than the nearest prefix; all where there is none.
        "sub.u32 nearer, prefixes, 1", "not.b32 wanted, prefixes", "and.b32 nearer, nearer, wanted",
        "and.b32 missing, missing, nearer", "setp.ne.u32 is, missing, 0", "@is bra READ",
        # And the nearest prefix itself.
        "sub.u32 wanted, prefixes, 1", "xor.b32 wanted, wanted, prefixes",
        "shr.u32 bit, wanted, lane", "and.b32 bit, bit, 1", "setp.eq.u32 is, bit, 0",
        f"@is mov.{size} part, {identity}", *_combine(op, kind),
        "setp.ne.u32 is, prefixes, 0", "@is bra FOUND",
        "sub.u32 left, left, 32", f"sub.u64 at, at, {512 if wide else 256}", "bra NEXT",
        "FOUND: mov.u32 bit, 0",
    ]  # fmt: skip
    for step in (16, 8, 4, 2, 1):
        if wide:
            lines += [
                "mov.b64 {low, high}, sum", f"shfl.sync.bfly.b32 low, low, {step}, 31, -1",
                f"shfl.sync.bfly.b32 high, high, {step}, 31, -1", "mov.b64 part, {low, high}",
            ]  # fmt: skip
        else:
            lines += [f"shfl.sync.bfly.b32 part, sum, {step}, 31, -1"]
        lines += _combine(op, kind)
    return lines


@cache
def look_back(op: str, kind: str) -> tuple[str, str]:
    """(text, constraints): what all tiles before come to, for all threads of a program.

    Scalars: the address of the state before the tile's own, and how many tiles are before it. The
    first warp walks, and hands over to the others in shared memory.
    """
    wide = kind.endswith("64")
    size = "b64" if wide else "b32"
    lines = [
        ".shared .align 8 .b8 handed[8]", ".reg .b32 thread, lane, hand",
        f".reg .{size} sum, part", *_WALK_REGISTERS,
        "mov.u32 thread, %tid.x", "and.b32 lane, thread, 31", "mov.u32 hand, handed",
        "setp.gt.u32 rest, thread, 31", "@rest bra MEET",
        f"mul.wide.u32 word, lane, {16 if wide else 8}", "sub.u64 at, $1, word", "mov.u32 left, $2",
        *_walk(op, kind), "setp.eq.u32 is, lane, 0", f"@is st.shared.{size} [hand], sum",
        "MEET: bar.sync 0", f"ld.shared.{size} $0, [hand]", "bar.sync 0",
    ]  # fmt: skip
    text = "{\n" + "\n".join(line + ";" for line in lines) + "\n}"
    return text, f"={'l' if wide else 'r'},l,r"


@cache
def places(warps: int, items: int) -> tuple[str, str]:
    """(text, constraints): of each element of a tile, how many are kept before it, in tiles before
    too: the scan of `compact` and its look-back.

    Inputs: whether it is kept, not 0; the number of the tile; the address of the tile's state. A
    thread's k-th element is its own place in the k-th run of as many elements as there are threads.

    A warp votes on 32 neighbours at a time. Their counts meet in shared memory; the first warp adds
    them up, publishes the sum, and walks back while the others wait.
    """
    text = _Text(["place"], ["keep", "tile"], items, ("state",))
    groups = warps * items
    each = groups // 32
    assert groups % 32 == 0
    tile, own = text.of("tile", 0), text.of("state", 0)
    text.add(
        f".shared .align 16 .b8 counts[{4 * groups}]",
        ".reg .b32 thread, lane, warp, lower, base, mine, part, sum, votes, count, begin, total",
        ".reg .b32 all, kind, end, some", f".reg .b32 rank<{items}>, c<{each}>",
        ".reg .pred first, last, head", *_WALK_REGISTERS,
        "mov.u32 base, counts", "mov.u32 thread, %tid.x", "and.b32 lane, thread, 31",
        "shr.u32 warp, thread, 5", "mov.u32 lower, 1", "shl.b32 lower, lower, lane",
        "sub.u32 lower, lower, 1", "shl.b32 mine, warp, 2", "add.u32 mine, mine, base",
        "setp.eq.u32 first, lane, 0", "setp.eq.u32 last, lane, 31",
    )  # fmt: skip
    for k in range(items):
        text.add(
            f"setp.ne.u32 is, {text.of('keep', k)}, 0", "vote.sync.ballot.b32 votes, is, -1",
            "and.b32 bit, votes, lower", f"popc.b32 rank{k}, bit",
            "selp.u32 count, 1, 0, is", f"add.u32 count, count, rank{k}",
            f"@last st.shared.u32 [mine+{4 * warps * k}], count",
        )  # fmt: skip
    text.add(
        "bar.sync 0", "setp.gt.u32 rest, warp, 0", "@rest bra MEET",
        f"mul.lo.u32 some, lane, {4 * each}", "add.u32 some, some, base", "mov.u32 total, 0",
    )  # fmt: skip
    for j in range(each):
        text.add(f"ld.shared.u32 c{j}, [some+{4 * j}]", f"add.u32 total, total, c{j}")
    text.add("mov.u32 begin, total")
    for step in (1, 2, 4, 8, 16):
        text.add(
            f"shfl.sync.up.b32 part|is, begin, {step}, 0, -1", "@is add.u32 begin, begin, part"
        )
    text.add(
        "shfl.sync.idx.b32 all, begin, 31, 31, -1", "sub.u32 begin, begin, total",
        f"setp.eq.u32 head, {tile}, 0", "selp.b32 kind, 2, 1, head", "mov.b64 word, {all, kind}",
        f"@first st.relaxed.gpu.global.u64 [{own}], word", "@head bra KNOWN",
        "mul.wide.u32 word, lane, 8", f"sub.u64 at, {own}, 8", "sub.u64 at, at, word",
        f"mov.u32 left, {tile}", *_walk("sum", "s32"), "add.u32 end, sum, all",
        "mov.b64 word, {end, two}", f"@first st.relaxed.gpu.global.u64 [{own}], word",
        "add.u32 begin, begin, sum", "KNOWN: mov.u32 bit, 0",
    )  # fmt: skip
    for j in range(each):
        text.add(f"st.shared.u32 [some+{4 * j}], begin", f"add.u32 begin, begin, c{j}")
    text.add("MEET: bar.sync 0")
    for k in range(items):
        text.add(
            f"ld.shared.u32 {text.of('place', k)}, [mine+{4 * warps * k}]",
            f"add.u32 {text.of('place', k)}, {text.of('place', k)}, rank{k}",
        )  # fmt: skip
    text.add("bar.sync 0")
    return text.done()


LOOK_BACK = """{
.reg .b64 at, word;
.reg .b32 value, status, sum;
.reg .pred is;
mov.u64 at, $1;
mov.u32 sum, 0;
AGAIN:
ld.relaxed.gpu.global.u64 word, [at];
mov.b64 {value, status}, word;
setp.eq.u32 is, status, 0;
@is bra AGAIN;
add.u32 sum, sum, value;
sub.u64 at, at, 2048;
setp.eq.u32 is, status, 1;
@is bra AGAIN;
mov.u32 $0, sum;
}"""
"""The sum of the states from an address on, back by 256 words a tile, to the nearest prefix; the
statuses of `_triton.py`. The first tile of all must publish a prefix. Each thread walks for itself.
"""
