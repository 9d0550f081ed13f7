"""What Triton has no word for, in PTX: counting and moving by index in shared memory.

Triton's tensors are moved by layouts, or gathered by index; threads cannot count into shared memory
at an address of their own, nor put a value there. Each text here is one `inline_asm_elementwise` of
a whole tile: all elements that a thread holds are its operands (`pack`), and it does not matter
which these are, for the place of each in the tile, its slot, is an operand too. The interpreter
knows no PTX: `sort_gpu.py` and `histogram_gpu.py` say the same in Triton for it.

Shared memory is declared within the text. Threads meet at barrier 0, as Triton's own do.
"""

from functools import cache


class _Text:
    """PTX with operands by name: outputs first, then inputs, `items` of each."""

    def __init__(self, outputs: list[str], inputs: list[str], items: int) -> None:
        self.names = {name: i * items for i, name in enumerate(outputs + inputs)}
        self.constraints = ",".join(
            ["=&r"] * (len(outputs) * items) + ["r"] * (len(inputs) * items)
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
