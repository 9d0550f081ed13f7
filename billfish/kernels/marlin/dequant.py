"""Inline assembly that turns packed INT4 words into 16-bit tensor-core fragments.

One piece of assembly takes two words and yields 8 registers, each a pair of neighbouring columns:
registers 4 i + 2 k3 + r3 (i: which word; k3: columns 8 to 15 of the step; r3: rows 8 to 15), the
order of registers in an m64k16 fragment of matrix A.

A nibble becomes a number by or-ing it into the mantissa of a constant. In float16, 0x6400 is 1024
with a last place of 1, so 0x6400 | q is 1024 + q, and with the nibble four bits higher 1024 + 16 q:
half of the nibbles need no shift. The mantissa of bfloat16 has 7 bits: 0x4300 | q is 128 + q, and
every nibble is shifted to the bottom. Subtracting the constant (and the zero point with it) is
exact, so the only rounding is that of the product with the scale. The float16 form is that of
Kim et al., "Who Says Elephants Can't Run" (arXiv 2211.10017), section 3.3.

What is subtracted and multiplied is the `mode`:

    "raw"    q                  zero point and scale are applied by the caller
    "code"   q - 8              "zero"   q - z         the scale is applied to fp32 sums afterwards
    "scale"  (q - 8) * s        "scale_zero"  (q - z) * s        "scale_offset"  q * s + o
"""

from functools import cache

_OPERANDS = {"raw": 0, "code": 0, "zero": 1, "scale": 1, "scale_zero": 2, "scale_offset": 2}
MODES = tuple(_OPERANDS)

_ONES = {"f16": "0x3c003c00", "bf16": "0x3f803f80"}
_MINUS_ONES = {"f16": "0xbc00bc00", "bf16": "0xbf80bf80"}
_MINUS_ZEROS = "0x80008000"
_BASE = {"f16": "0x64006400", "bf16": "0x43004300"}
# Minus the constant under a nibble, without and with the symmetric zero point 8: for f16 of the
# unshifted nibbles (1024, times 1) and of those four bits up (1024, times 1/16: 64).
_MINUS = {
    ("f16", 0): ("0xe400e400", "0xe408e408"),
    ("f16", 1): ("0xd400d400", "0xd480d480"),
    ("bf16", 0): ("0xc300c300", "0xc308c308"),
    ("bf16", 1): ("0xc300c300", "0xc308c308"),
}
_FACTOR = {
    ("f16", 0): "0x3c003c00",
    ("f16", 1): "0x2c002c00",
    ("bf16", 0): "0x3f803f80",
    ("bf16", 1): "0x3f803f80",
}


def operand_count(mode: str) -> int:
    """How many tensors the assembly takes: the words, then scales and zeros as the mode needs."""
    return 1 + _OPERANDS[mode]


def constraints(mode: str) -> str:
    """The register constraints of `assembly(dtype, mode)` for two elements a call."""
    return ",".join(["=&r"] * 8 + ["r"] * (2 * operand_count(mode)))


@cache
def assembly(dtype: str, mode: str) -> str:
    """PTX for two words. `dtype` is "f16" or "bf16"; a mode is described above.

    Operands: $0-$7 the results; $8, $9 the words; then for each tensor of the mode (scales before
    zeros or offsets) the word of row pairs that goes with each of the two code words.
    """
    lines = [f".reg .b32 t, one, neg, m0, m1, s0, s1, z0, z1, c<{4}>;"]
    lines += [f"mov.b32 one, {_ONES[dtype]};", f"mov.b32 neg, {_MINUS_ONES[dtype]};"]
    for half in (0, 1):
        lines += _one_word(dtype, mode, half)
    return "{\n" + "\n".join(lines) + "\n}\n"


def _one_word(dtype: str, mode: str, half: int) -> list[str]:
    word = f"${8 + half}"
    out = [f"${4 * half + j}" for j in range(4)]
    lines = _extract(dtype, word, out)
    if operand_count(mode) > 1:
        lines += _meta(mode, half)
    centre = 1 if mode in ("code", "scale") else 0
    for j, register in enumerate(out):
        shifted = j & 1  # float16: nibbles 1 and 3 sit four bits up; they belong to rows 8 to 15
        row = f"{j & 1}"
        lines.append(f"mov.b32 c0, {_FACTOR[dtype, shifted]};")
        lines.append(f"mov.b32 c1, {_MINUS[dtype, shifted][centre]};")
        if mode in ("zero", "scale_zero"):
            lines.append(f"fma.rn.{dtype}x2 c1, z{row}, neg, c1;")
        lines.append(f"fma.rn.{dtype}x2 {register}, {register}, c0, c1;")
        if mode in ("scale", "scale_zero"):
            lines.append(f"mov.b32 c2, {_MINUS_ZEROS};")
            lines.append(f"fma.rn.{dtype}x2 {register}, {register}, s{row}, c2;")
        elif mode == "scale_offset":
            lines.append(f"fma.rn.{dtype}x2 {register}, {register}, s{row}, z{row};")
    return lines


def _extract(dtype: str, word: str, out: list[str]) -> list[str]:
    """Nibbles j and j + 4 of the word into register j, as constant + q (or + 16 q)."""
    both = _BASE[dtype]
    if dtype == "bf16":
        lines = []
        for j, register in enumerate(out):
            lines.append(f"shr.u32 t, {word}, {4 * j};" if j else f"mov.b32 t, {word};")
            lines.append(f"lop3.b32 {register}, t, 0x000f000f, {both}, 0xea;")
        return lines
    return [
        f"lop3.b32 {out[0]}, {word}, 0x000f000f, {both}, 0xea;",
        f"lop3.b32 {out[1]}, {word}, 0x00f000f0, {both}, 0xea;",
        f"shr.u32 t, {word}, 8;",
        f"lop3.b32 {out[2]}, t, 0x000f000f, {both}, 0xea;",
        f"lop3.b32 {out[3]}, t, 0x00f000f0, {both}, 0xea;",
    ]


def _meta(mode: str, half: int) -> list[str]:
    """Spread the row pair of scales and zeros: s0 and z0 hold rows 0 to 7, s1 and z1 the others."""
    lines = []
    operand = 10 + half
    if mode != "zero":
        lines.append(f"prmt.b32 s0, ${operand}, ${operand}, 0x1010;")
        lines.append(f"prmt.b32 s1, ${operand}, ${operand}, 0x3232;")
        operand += 2
    if mode != "scale":
        lines.append(f"prmt.b32 z0, ${operand}, ${operand}, 0x1010;")
        lines.append(f"prmt.b32 z1, ${operand}, ${operand}, 0x3232;")
    return lines
