"""What Triton has no word for, in PTX: counting and moving by index in shared memory.

Triton's tensors are moved by layouts, or gathered by index; threads cannot count into shared memory
at an address of their own, nor put a value there. Each text here is one `inline_asm_elementwise` of
a whole tile: all elements that a thread holds are its operands (`pack`), and it does not matter
which these are, for the place of each in the tile, its slot, is an operand too. The interpreter
knows no PTX: `sort_gpu.py` and `histogram_gpu.py` say the same in Triton for it.

Shared memory is declared within the text. Threads meet at barrier 0, as Triton's own do. Texts that
look back are in `_ptx_look_back.py`.
"""

from functools import cache
from itertools import accumulate


class Text:
    """PTX with operands by name: outputs first, then inputs, then addresses, `items` of each; one
    of bytes, `packed`, before the inputs, four in a word."""

    def __init__(
        self, outputs: list[str], inputs: list[str], items: int, addresses: tuple[str, ...] = (),
        packed: str | None = None,
    ) -> None:  # fmt: skip
        sizes = dict.fromkeys(outputs, items)
        if packed:
            sizes[packed] = items // 4
        sizes |= dict.fromkeys([*inputs, *addresses], items)
        starts = accumulate(sizes.values(), initial=0)
        self.names = dict(zip(sizes, starts, strict=False))
        given = (items // 4 if packed else 0) + len(inputs) * items
        self.constraints = ",".join(
            ["=&r"] * (len(outputs) * items) + ["r"] * given + ["l"] * (len(addresses) * items)
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
    text = Text(["count"], inputs, items)
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


SPAN = 24576
"""Bins that a program counts at once in halves of words: 48 KiB."""


@cache
def halves(warps: int, items: int) -> tuple[str, str, str, str]:
    """Three texts for SPAN bins of 16 bits in shared memory, and the constraints of the second.

    The first clears them (=r,r: what is given and comes out is of no use), and declares them for
    the others: outside of a block, so that all of the kernel sees it. The second counts: an
    element's bin is below SPAN, or it is not counted; the address of the first bin in memory, of 64
    bits, goes along. The third adds them to those in memory (=r,l: their address).

    A half that gets to 2^15 goes to memory: who took it there takes it away again. All threads meet
    before they count on, so that it gets less than another 2^15 meanwhile.
    """
    threads = 32 * warps
    clear = [
        f".shared .align 16 .b8 halves[{2 * SPAN}]", "{", ".reg .b32 base, mine, none",
        "mov.u32 mine, %tid.x", "shl.b32 mine, mine, 4", "mov.u32 base, halves",
        "add.u32 mine, mine, base", "mov.u32 none, 0", "mov.u32 $0, 0",
    ]  # fmt: skip
    for begin in range(0, 2 * SPAN, 16 * threads):
        clear.append(f"st.shared.v4.u32 [mine+{begin}], {{none, none, none, none}}")
    count = [
        "{", ".reg .b32 base, at, one, old, shift", ".reg .b64 far, many", ".reg .pred is, full",
        "mov.u32 base, halves", "bar.sync 0",
    ]  # fmt: skip
    for k in range(items):
        bin = f"${items + k}"
        count += [
            f"mov.u32 ${k}, 0", f"setp.lt.u32 is, {bin}, {SPAN}", f"shr.u32 at, {bin}, 1",
            "shl.b32 at, at, 2", "add.u32 at, at, base", f"and.b32 shift, {bin}, 1",
            "shl.b32 shift, shift, 4", "mov.u32 one, 1", "shl.b32 one, one, shift",
            "mov.u32 old, 0", "@is atom.shared.add.u32 old, [at], one",
            "shr.u32 old, old, shift", "and.b32 old, old, 65535",
            "setp.eq.u32 full, old, 32767", "mov.u32 one, 4294934528", "shl.b32 one, one, shift",
            "@full red.shared.add.u32 [at], one", f"mul.wide.u32 far, {bin}, 8",
            f"add.u64 far, far, ${2 * items + k}", "mov.u64 many, 32768",
            "@full red.global.add.u64 [far], many",
        ]  # fmt: skip
    add = [
        "{", ".reg .b32 base, at, both, half, zero", ".reg .b64 far, many", ".reg .pred is",
        "mov.u32 $0, 0", "mov.u32 zero, 0", "mov.u32 at, %tid.x", "mul.wide.u32 far, at, 16",
        "add.u64 far, far, $1", "shl.b32 at, at, 2", "mov.u32 base, halves", "add.u32 at, at, base",
        "bar.sync 0",
    ]  # fmt: skip
    for begin in range(0, 2 * SPAN, 4 * threads):
        add.append(f"ld.shared.u32 both, [at+{begin}]")
        for part, offset in (("and.b32 half, both, 65535", 0), ("shr.u32 half, both, 16", 8)):
            add += [
                part, "setp.ne.u32 is, half, 0", "mov.b64 many, {half, zero}",
                f"@is red.global.add.u64 [far+{4 * begin + offset}], many",
            ]  # fmt: skip
    first, second, third = (
        "\n".join(line if line == "{" else line + ";" for line in lines) + "\n}"
        for lines in (clear, count, add)
    )
    return first, second, third, ",".join(["=&r"] * items + ["r"] * items + ["l"] * items)


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
    text = Text(["count"] + [f"moved{w}" for w in range(words)], inputs, items)
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
