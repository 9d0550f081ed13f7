"""Look-backs (`_triton.py`) in PTX: of a scan, of the digits of a sort, and of a compaction.

One warp walks with votes and plain loads, where Triton would have all threads of a program meet at
each turn. What a text of PTX is here, and why: `_ptx.py`.
"""

from functools import cache

import torch

from billfish.kernels.general._ptx import Text

KINDS = {torch.float64: "f64", torch.float32: "f32", torch.int64: "s64", torch.int32: "s32"}
"""What PTX calls the dtypes of sums."""

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
def gather(words: int, warps: int, items: int) -> tuple[str, str]:
    """(text, constraints): what is kept of a tile side by side, and where that and zeros go.

    Inputs: whether an element is kept, not 0, four in a word; `words` 32-bit words of each; the
    number of the tile; how many elements there are from the tile's first on; the addresses of the
    tile's state and of the count of all. A thread has 4 neighbours, those of its warp have its
    neighbours, and so on for all warps, `items` / 4 times. Outputs: words of some element, and
    where it goes, -1 for nowhere: threads' neighbours have those that go side by side.

    A warp scans its counts of up to 4 runs of 128 at once, a byte each. Counts of all warps meet in
    shared memory; the first warp adds them up, publishes the sum, and walks back while the others
    put what is kept in its place in the tile.
    """
    runs, threads = items // 4, 32 * warps
    assert items % 4 == 0
    assert runs <= min(4, 32 // warps)
    inputs = [f"word{w}" for w in range(words)] + ["tile", "left"]
    text = Text([f"moved{w}" for w in range(words)] + ["to"], inputs, items, ("state", "count"),
                 packed="keep")  # fmt: skip
    tile, left = text.of("tile", 0), text.of("left", 0)
    own, count = text.of("state", 0), text.of("count", 0)
    text.add(
        f".shared .align 16 .b8 buffer[{4 * threads * items * words}]",
        f".shared .align 16 .b8 counts[{4 * runs * warps}]", ".shared .align 8 .b8 handed[8]",
        ".reg .b32 thread, lane, warp, base, hand, mine, part, sum, packed, extra, begin, total",
        ".reg .b32 all, kind, end, some, place, slot, zero",
        f".reg .b32 flag<{runs}>, at<{runs}>", ".reg .pred first, last, head", *_WALK_REGISTERS,
        "mov.u32 base, counts", "mov.u32 hand, handed", "mov.u32 thread, %tid.x",
        "and.b32 lane, thread, 31", "shr.u32 warp, thread, 5", "shl.b32 mine, warp, 2",
        "add.u32 mine, mine, base", "setp.eq.u32 first, lane, 0", "setp.eq.u32 last, lane, 31",
        "mov.u32 packed, 0",
    )  # fmt: skip
    for g in range(runs):
        # A bit for each byte that is not 0.
        text.add(f"mov.b32 flag{g}, {text.of('keep', g)}")
        for shift, mask in ((4, 0x0F0F0F0F), (2, 0x3F3F3F3F), (1, 0x7F7F7F7F)):
            text.add(
                f"shr.u32 extra, flag{g}, {shift}", f"and.b32 extra, extra, {mask}",
                f"or.b32 flag{g}, flag{g}, extra",
            )  # fmt: skip
        text.add(
            f"and.b32 flag{g}, flag{g}, {0x01010101}", f"popc.b32 extra, flag{g}",
            f"shl.b32 extra, extra, {8 * g}", "add.u32 packed, packed, extra",
        )  # fmt: skip
    text.add("mov.u32 sum, packed")
    for step in (1, 2, 4, 8, 16):
        text.add(f"shfl.sync.up.b32 part|is, sum, {step}, 0, -1", "@is add.u32 sum, sum, part")
    for g in range(runs):
        text.add(
            f"shr.u32 extra, sum, {8 * g}", "and.b32 extra, extra, 255",
            f"@last st.shared.u32 [mine+{4 * warps * g}], extra",
        )  # fmt: skip
    # What lanes before keep of each run.
    text.add("sub.u32 packed, sum, packed", "bar.sync 0", "setp.gt.u32 rest, warp, 0",
             "@rest bra BEGINS", f"setp.lt.u32 is, lane, {runs * warps}", "shl.b32 some, lane, 2",
             "add.u32 some, some, base", "mov.u32 total, 0", "@is ld.shared.u32 total, [some]",
             "mov.u32 begin, total")  # fmt: skip
    for step in (1, 2, 4, 8, 16):
        text.add(
            f"shfl.sync.up.b32 part|there, begin, {step}, 0, -1",
            "@there add.u32 begin, begin, part",
        )
    text.add(
        "shfl.sync.idx.b32 all, begin, 31, 31, -1", "sub.u32 begin, begin, total",
        "@is st.shared.u32 [some], begin", f"setp.eq.u32 head, {tile}, 0",
        "selp.b32 kind, 2, 1, head", "mov.b64 word, {all, kind}",
        f"@first st.relaxed.gpu.global.u64 [{own}], word",
        "BEGINS: bar.sync 0", "@rest bra STORE", "mov.u32 sum, 0", "@head bra KNOWN",
        "mul.wide.u32 word, lane, 8", f"sub.u64 at, {own}, 8", "sub.u64 at, at, word",
        f"mov.u32 left, {tile}", *_walk("sum", "s32"), "add.u32 end, sum, all",
        "mov.b64 word, {end, two}", f"@first st.relaxed.gpu.global.u64 [{own}], word",
        "KNOWN: add.u32 end, sum, all", "@first st.shared.u32 [hand], sum",
        "@first st.shared.u32 [hand+4], all", "mov.u32 some, 0", "mov.b64 word, {end, some}",
        f"setp.le.s32 is, {left}, {threads * items}", "and.pred first, first, is",
        f"@first st.relaxed.gpu.global.u64 [{count}], word",
        "STORE: mov.u32 extra, buffer",
    )  # fmt: skip
    for g in range(runs):
        text.add(
            f"ld.shared.u32 at{g}, [mine+{4 * warps * g}]", f"shr.u32 part, packed, {8 * g}",
            "and.b32 part, part, 255", f"add.u32 at{g}, at{g}, part", f"shl.b32 at{g}, at{g}, 2",
            f"add.u32 at{g}, at{g}, extra",
            # In byte j, 4 times how many of the thread's are kept before its j-th.
            f"mul.lo.u32 part, flag{g}, {0x04040400}",
        )  # fmt: skip
        for j in range(4):
            text.add(
                f"shr.u32 place, part, {8 * j}", "and.b32 place, place, 255",
                f"add.u32 place, place, at{g}", f"and.b32 some, flag{g}, {1 << (8 * j)}",
                "setp.ne.u32 is, some, 0",
            )  # fmt: skip
            for w in range(words):
                word, behind = text.of(f"word{w}", 4 * g + j), 4 * threads * items * w
                text.add(f"@is st.shared.u32 [place+{behind}], {word}")
    text.add(
        "bar.sync 0", "ld.shared.u32 sum, [hand]", "ld.shared.u32 all, [hand+4]",
        "sub.u32 total, all, thread", f"sub.u32 end, {left}, thread", "add.u32 slot, sum, thread",
        "add.u32 zero, sum, total", f"add.u32 zero, zero, {left}", "sub.u32 zero, zero, 1",
        "shl.b32 some, thread, 2", "add.u32 extra, extra, some",
    )  # fmt: skip
    for k in range(items):
        to = text.of("to", k)
        text.add(
            f"setp.gt.s32 is, total, {k * threads}", f"add.u32 place, slot, {k * threads}",
            f"sub.u32 {to}, zero, {k * threads}", f"selp.b32 {to}, place, {to}, is",
            f"setp.gt.s32 there, end, {k * threads}", f"selp.b32 {to}, {to}, -1, there",
        )  # fmt: skip
        for w in range(words):
            moved = text.of(f"moved{w}", k)
            at = 4 * threads * (k + items * w)
            text.add(f"mov.u32 {moved}, 0", f"@is ld.shared.u32 {moved}, [extra+{at}]")
    return text.done()


DIGITS_AT_ONCE = 4
"""Tiles whose states a thread reads at once; state tensors begin with room for one fewer."""


@cache
def look_back_at_digits(at_once: int = DIGITS_AT_ONCE) -> str:
    """The sum of the states from an address on, back by 256 words a tile, to the nearest prefix;
    the statuses of `_triton.py`. The first tile of all must publish a prefix.

    Each thread walks for itself, and reads some states at once: each read is a memory latency. It
    reads on from the first that was not there.
    """
    names = [f"word{k}" for k in range(at_once)]
    lines = [
        f".reg .b64 at, {', '.join(names)}", ".reg .b32 value, status, sum, left",
        ".reg .pred is, going", "mov.u64 at, $1", "mov.u32 sum, 0", "mov.u32 left, 1",
        f"AGAIN: ld.relaxed.gpu.global.u64 {names[0]}, [at]",
        *(f"ld.relaxed.gpu.global.u64 {names[k]}, [at+{-2048 * k}]" for k in range(1, at_once)),
        "setp.ne.u32 going, left, 0",
    ]  # fmt: skip
    for name in names:
        lines += [
            f"mov.b64 {{value, status}}, {name}", "setp.ne.and.u32 going, status, 0, going",
            "@going add.u32 sum, sum, value", "@going sub.u64 at, at, 2048",
            "setp.eq.and.u32 is, status, 2, going", "@is mov.u32 left, 0",
            "setp.ne.and.u32 going, status, 2, going",
        ]  # fmt: skip
    lines += ["setp.ne.u32 is, left, 0", "@is bra AGAIN", "mov.u32 $0, sum"]
    return "{\n" + "\n".join(line + ";" for line in lines) + "\n}"
