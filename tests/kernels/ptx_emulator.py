"""Runs a text of `billfish.kernels.general._ptx` for all threads of a program in step.

It knows the instructions that those texts use and has no time: what it cannot find is a barrier
that is missing. That two threads write to one place, or read what nobody wrote, it does find.
"""

import re

import numpy as np

KINDS = {"u8": np.uint8, "u16": np.uint16, "u32": np.uint32}
WORDS = {
    "add.u32": np.add, "sub.u32": np.subtract, "mul.lo.u32": np.multiply, "and.b32": np.bitwise_and,
    "shl.b32": np.left_shift, "shr.u32": np.right_shift,
}  # fmt: skip
COMPARISONS = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "gt": np.greater,
               "ge": np.greater_equal}  # fmt: skip


class Emulator:
    def __init__(self, threads: int, operands: dict[int, np.ndarray]) -> None:
        self.threads = threads
        self.lane = np.arange(threads) % 32
        self.words = {f"${i}": word.astype(np.uint32) for i, word in operands.items()}
        self.words["%tid.x"] = np.arange(threads, dtype=np.uint32)
        self.flags: dict[str, np.ndarray] = {}
        self.memory = np.zeros(1 << 16, np.uint8)
        self.written = np.zeros(1 << 16, bool)
        self.end = 256  # of what is declared

    def run(self, text: str) -> dict[str, np.ndarray]:
        for line in text.strip()[1:-1].split(";"):
            if line.strip() and not line.strip().startswith(".reg"):
                self._step(line.strip())
        return self.words

    def _word(self, name: str) -> np.ndarray:
        if re.fullmatch(r"-?\d+", name):
            return np.full(self.threads, int(name) % 2**32, np.uint32)
        return self.words[name]

    def _place(self, operand: str, size: int) -> np.ndarray:
        base, _, offset = operand[1:-1].partition("+")
        place = self._word(base).astype(np.int64) + int(offset or 0)
        assert not (place[self.active] % size).any()
        return place[self.active, None] + np.arange(size)

    def _put(self, name: str, value: np.ndarray) -> None:
        before = self.words.get(name, np.zeros(self.threads, np.uint32))
        self.words[name] = np.where(self.active, value.astype(np.uint32), before)

    def _step(self, line: str) -> None:
        self.active = np.ones(self.threads, bool)
        if line.startswith("@"):
            guard, line = line[1:].split(" ", 1)
            self.active = ~self.flags[guard[1:]] if guard[0] == "!" else self.flags[guard]
        code, _, rest = line.partition(" ")
        a = [x.strip() for x in re.split(r",(?![^{]*})", rest)]
        if code == ".shared":
            name, size = re.findall(r"(\w+)\[(\d+)\]", line)[0]
            self.words[name] = np.full(self.threads, self.end, np.uint32)
            self.end += int(size)
        elif code.startswith("bar."):
            assert self.active.all()
        elif code == "mov.u32":
            self._put(a[0], self._word(a[1]))
        elif code in WORDS:
            self._put(a[0], WORDS[code](self._word(a[1]), self._word(a[2])))
        elif code == "not.b32":
            self._put(a[0], ~self._word(a[1]))
        elif code == "popc.b32":
            self._put(a[0], np.array([int(x).bit_count() for x in self._word(a[1])]))
        elif code == "and.pred":
            self.flags[a[0]] = self.flags[a[1]] & self.flags[a[2]]
        elif code.startswith("setp."):
            _, comparison, kind = code.split(".")
            kind = np.int32 if kind == "s32" else np.uint32
            both = self._word(a[1]).astype(kind), self._word(a[2]).astype(kind)
            self.flags[a[0]] = COMPARISONS[comparison](*both)
        elif code == "vote.sync.ballot.b32":
            votes = (self.flags[a[1]].astype(np.uint64) << self.lane.astype(np.uint64)).reshape(
                -1, 32
            )
            self._put(a[0], votes.sum(1).repeat(32))
        elif code == "shfl.sync.up.b32":
            name, flag = a[0].split("|")
            self.flags[flag] = self.lane >= int(a[2])
            word = self._word(a[1])
            source = np.where(self.flags[flag], np.arange(self.threads) - int(a[2]), 0)
            self._put(name, np.where(self.flags[flag], word[source], word))
        else:
            self._access(code, a)

    def _access(self, code: str, a: list[str]) -> None:
        if code == "red.shared.add.u32":
            place = self._place(a[0], 4)
            assert self.written[place].all()
            np.add.at(self.memory.view(np.uint32), place[:, 0] // 4, np.uint32(int(a[1])))
        elif code == "st.shared.v4.u32":
            assert {*re.findall(r"\w+", a[1])} == {"none"}
            place = self._place(a[0], 16)
            self.memory[place], self.written[place] = 0, True
        elif code.startswith("ld.shared."):
            kind = np.dtype(KINDS[code.split(".")[2]])
            place = self._place(a[1], kind.itemsize)
            assert self.written[place].all()
            word = np.zeros(self.threads, np.uint32)
            word[self.active] = self.memory[place].view(kind)[:, 0]
            self._put(a[0], word)
        else:
            assert code.startswith("st.shared."), code
            kind = np.dtype(KINDS[code.split(".")[2]])
            place = self._place(a[0], kind.itemsize)
            assert len(np.unique(place)) == place.size
            assert place.size == 0 or place.max() < self.end
            word = self._word(a[1])[self.active].astype(kind)
            self.memory[place], self.written[place] = word[:, None].view(np.uint8), True
