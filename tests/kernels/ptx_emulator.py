"""Runs a text of PTX of the general kernels for all threads of a program in step.

It knows the instructions that those texts use and has no time: what it cannot find is a barrier
that is missing. That two threads write to one place, or read what nobody wrote, it does find.

Threads that branch wait at the label until the others come there. Floats are the bits of words.
"""

import re

import numpy as np

KINDS = {"u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "b32": np.uint32, "b64": np.uint64}
WORDS = {
    "add.u32": np.add, "sub.u32": np.subtract, "mul.lo.u32": np.multiply, "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "shl.b32": np.left_shift, "shr.u32": np.right_shift, "xor.b32": np.bitwise_xor,
    "add.u64": np.add, "sub.u64": np.subtract,
}  # fmt: skip
FOLDS = {"add": np.add, "max": np.fmax, "min": np.fmin, "max.NaN": np.maximum,
         "min.NaN": np.minimum}  # fmt: skip
"""With a kind behind."""
FOLDED = {"s32": np.int32, "f32": np.float32, "s64": np.int64, "f64": np.float64}
COMPARISONS = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
               "gt": np.greater, "ge": np.greater_equal}  # fmt: skip


class Emulator:
    def __init__(
        self, threads: int, operands: dict[int, np.ndarray], states: np.ndarray | None = None
    ) -> None:
        """states: words of 64 bits in global memory, from address 0 on."""
        self.threads = threads
        self.lane = np.arange(threads) % 32
        self.words = {f"${i}": word.astype(np.uint64) for i, word in operands.items()}
        self.words["%tid.x"] = np.arange(threads, dtype=np.uint32)
        self.flags: dict[str, np.ndarray] = {}
        self.memory = np.zeros(1 << 16, np.uint8)
        self.written = np.zeros(1 << 16, bool)
        self.end = 256  # of what is declared
        self.states = np.zeros(0, np.uint64) if states is None else states

    def run(self, text: str) -> dict[str, np.ndarray]:
        lines, labels = [], {}
        for line in re.split(r"[;\n]+", text):
            if line.strip() in ("{", "}"):
                continue
            label, colon, rest = line.strip().rpartition(": ")
            if colon:
                labels[label] = len(lines)
            if rest and not rest.startswith(".reg"):
                lines.append(rest)
        # Where each thread is; the furthest behind go on.
        at = np.zeros(self.threads, int)
        while (now := int(at.min())) < len(lines):
            self.here = at == now
            target = self._step(lines[now])
            at[self.here] += 1
            if target:
                at[self.active] = labels[target]
        return self.words

    def _word(self, name: str, kind: type = np.uint32) -> np.ndarray:
        if re.fullmatch(r"-?\w+", name) and name[-1].isdigit() and (name[0] in "-0123456789"):
            return np.full(self.threads, int(name, 0) % 2**64, np.uint64).astype(kind)
        return self.words[name].astype(kind)

    def polled(self) -> None:
        """Called before each read of a state: what others would do meanwhile."""

    def _place(self, operand: str, size: int) -> np.ndarray:
        base, _, offset = operand[1:-1].partition("+")
        place = self._word(base, np.uint64).astype(np.int64) + int(offset or 0)
        assert not (place[self.active] % size).any()
        return place[self.active, None] + np.arange(size)

    def _put(self, name: str, value: np.ndarray, kind: type = np.uint32) -> None:
        before = self.words.get(name, np.zeros(self.threads, np.uint64))
        self.words[name] = np.where(self.active, value.astype(kind).astype(np.uint64), before)

    def _flag(self, name: str, value: np.ndarray) -> None:
        before = self.flags.get(name, np.zeros(self.threads, bool))
        self.flags[name] = np.where(self.active, value, before)

    def _together(self) -> None:
        """All threads of a warp, or none."""
        warps = self.active.reshape(-1, 32)
        assert (warps.all(1) == warps.any(1)).all()

    def _step(self, line: str) -> str | None:
        """Returns where the active threads go on, if not at the next line."""
        self.active = self.here.copy()
        if line.startswith("@"):
            guard, line = line[1:].split(" ", 1)
            self.active &= ~self.flags[guard[1:]] if guard[0] == "!" else self.flags[guard]
        code, _, rest = line.partition(" ")
        a = [x.strip() for x in re.split(r",(?![^{]*})", rest)]
        if code == ".shared":
            name, size = re.findall(r"(\w+)\[(\d+)\]", line)[0]
            self.words[name] = np.full(self.threads, self.end, np.uint32)
            self.end += int(size)
        elif code.startswith("bar."):
            assert self.active.all()
        elif code in ("mov.u32", "mov.u64"):
            kind = np.uint64 if code.endswith("64") else np.uint32
            self._put(a[0], self._word(a[1], kind), kind)
        elif code == "bra":
            return a[0]
        elif code in WORDS:
            kind = np.uint64 if code.endswith("64") else np.uint32
            self._put(a[0], WORDS[code](self._word(a[1], kind), self._word(a[2], kind)), kind)
        elif code.rpartition(".")[0] in FOLDS and code.rpartition(".")[2] in FOLDED:
            kind = FOLDED[code.rpartition(".")[2]]
            bits = np.uint64 if code.endswith("64") else np.uint32
            both = (self._word(x, bits).view(kind) for x in a[1:])
            self._put(a[0], FOLDS[code.rpartition(".")[0]](*both).view(bits), bits)
        elif code == "mul.wide.u32":
            both = self._word(a[1], np.uint64), self._word(a[2], np.uint64)
            self._put(a[0], np.multiply(*both), np.uint64)
        elif code in ("selp.b32", "selp.u32"):
            self._put(a[0], np.where(self.flags[a[3]], self._word(a[1]), self._word(a[2])))
        elif code in ("mov.b32", "mov.b64"):
            self._move(code, a)
        elif code == "not.b32":
            self._put(a[0], ~self._word(a[1]))
        elif code == "popc.b32":
            self._put(a[0], np.array([int(x).bit_count() for x in self._word(a[1])]))
        elif code == "and.pred":
            self._flag(a[0], self.flags[a[1]] & self.flags[a[2]])
        elif code == "setp.nan.f64":
            both = [self._word(x, np.uint64).view(np.float64) for x in a[1:]]
            self._flag(a[0], np.isnan(both).any(0))
        elif code.startswith("setp."):
            _, comparison, *also, kind = code.split(".")
            kind = np.int32 if kind == "s32" else np.uint32
            both = self._word(a[1]).astype(kind), self._word(a[2]).astype(kind)
            found = COMPARISONS[comparison](*both)
            self._flag(a[0], found & self.flags[a[3]] if also == ["and"] else found)
        elif code == "vote.sync.ballot.b32":
            self._together()
            votes = (self.flags[a[1]].astype(np.uint64) << self.lane.astype(np.uint64)).reshape(
                -1, 32
            )
            self._put(a[0], votes.sum(1).repeat(32))
        elif code == "shfl.sync.bfly.b32":
            self._together()
            self._put(a[0], self._word(a[1])[np.arange(self.threads) ^ int(a[2])])
        elif code == "shfl.sync.idx.b32":
            self._together()
            self._put(a[0], self._word(a[1])[np.arange(self.threads) // 32 * 32 + int(a[2])])
        elif code == "shfl.sync.up.b32":
            self._together()
            name, flag = a[0].split("|")
            self._flag(flag, self.lane >= int(a[2]))
            word = self._word(a[1])
            source = np.where(self.flags[flag], np.arange(self.threads) - int(a[2]), 0)
            self._put(name, np.where(self.flags[flag], word[source], word))
        else:
            self._access(code, a)
        return None

    def _move(self, code: str, a: list[str]) -> None:
        """Between words, or the halves of one and two others."""
        if a[0].startswith("{"):
            low, high = re.findall(r"\w+", a[0])
            word = self._word(a[1], np.uint64)
            self._put(low, word % 2**32)
            self._put(high, word >> np.uint64(32))
        elif a[1].startswith("{"):
            low, high = (self._word(x, np.uint64) for x in re.findall(r"\w+", a[1]))
            self._put(a[0], low | (high << np.uint64(32)), np.uint64)
        else:
            kind = np.uint64 if code.endswith("64") else np.uint32
            self._put(a[0], self._word(a[1], kind), kind)

    def _access(self, code: str, a: list[str]) -> None:
        if code in ("red.shared.add.u32", "atom.shared.add.u32"):
            place = self._place(a[-2], 4)
            assert self.written[place].all()
            words, at = self.memory.view(np.uint32), place[:, 0] // 4
            more = self._word(a[-1])[self.active]
            if code.startswith("atom"):
                old = np.zeros(self.threads, np.uint32)
                for thread, i, one in zip(np.flatnonzero(self.active), at, more, strict=True):
                    old[thread] = words[i]
                    words[i] += one
                self._put(a[0], old)
            else:
                np.add.at(words, at, more)
        elif code == "red.global.add.u64":
            place = self._place(a[0], 8)[:, 0] // 8
            np.add.at(self.states, place, self._word(a[1], np.uint64)[self.active])
        elif code == "st.shared.v4.u32":
            assert {*re.findall(r"\w+", a[1])} == {"none"}
            place = self._place(a[0], 16)
            self.memory[place], self.written[place] = 0, True
        elif code == "ld.relaxed.gpu.global.u64":
            self.polled()
            word = np.zeros(self.threads, np.uint64)
            word[self.active] = self.states[self._place(a[1], 8)[:, 0] // 8]
            self._put(a[0], word, np.uint64)
        elif code == "st.relaxed.gpu.global.u64":
            assert self.active.sum() <= 1
            self.states[self._place(a[0], 8)[:, 0] // 8] = self._word(a[1], np.uint64)[self.active]
        elif code.startswith("ld.shared."):
            kind = np.dtype(KINDS[code.split(".")[2]])
            place = self._place(a[1], kind.itemsize)
            assert self.written[place].all()
            word = np.zeros(self.threads, np.uint64)
            word[self.active] = self.memory[place].view(kind)[:, 0]
            self._put(a[0], word, np.uint64)
        else:
            assert code.startswith("st.shared."), code
            kind = np.dtype(KINDS[code.split(".")[2]])
            place = self._place(a[0], kind.itemsize)
            assert len(np.unique(place)) == place.size
            assert place.size == 0 or place.max() < self.end
            word = self._word(a[1], np.uint64)[self.active].astype(kind)
            self.memory[place], self.written[place] = word[:, None].view(np.uint8), True
