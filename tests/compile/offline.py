"""Compile GPU kernels on a machine without a GPU, and read the machine code.

Triton asks its driver for a target before it compiles; `FakeDriver` answers, so
`kernel.warmup(...)` with CPU tensors yields a cubin for any target. The disassembler and the
assembler come with the triton package.
"""

import ast
import io
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import code_generator
from triton.runtime import driver

ARCHITECTURES = {80: "sm_80", 90: "sm_90a"}
"""What code of a compute capability is compiled for."""
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Recorder:
    """Stands for a kernel: keeps the arguments of its launch."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launch(*arguments: Any, **keywords: Any) -> None:
            self.arguments, self.keywords = arguments, keywords

        return launch


class FakeDriver:
    """Answers what Triton asks of a driver before compilation, for a GPU that is not there."""

    class utils:
        @staticmethod
        def get_device_properties(_device: int) -> dict[str, int]:
            return {"max_shared_mem": 232448, "multiprocessor_count": 132}

    class launcher_cls:
        def __init__(self, *_args: object) -> None:
            raise RuntimeError("a kernel compiled for a fake device cannot be launched")

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        # Triton caches compiled kernels by device number: one number for each target.
        return self.target.arch

    def get_current_stream(self, _device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, _type: str) -> str:
        return "void *"


_reports: dict[str, str] = {}
"""What the assembler said, by PTX, of all that this process has compiled."""


@contextmanager
def loops_watched() -> Iterator[None]:
    """Within the block, a loop that would lose a variable does not compile.

    Triton walks through a loop's body once, and carries a variable from turn to turn if its value
    is another then. One that takes over what another began with, and itself began as the same
    value, looks unchanged: all turns would see the first one's.
    """
    generator = code_generator.CodeGenerator
    find, verify = generator._find_carries, generator._verify_loop_carried_variable
    walks: list[dict[str, Any]] = []

    def handles(value: Any) -> list[Any]:
        return code_generator.flatten_values_to_ir([value])

    def noted(self: Any, name: str, after: Any, before: Any) -> None:
        walks[-1][name] = after
        verify(self, name, after, before)

    def watched(self: Any, node: Any, liveins: dict[str, Any], *rest: Any, **more: Any) -> Any:
        walks.append({})
        found = find(self, node, liveins, *rest, **more)
        walked, carried = walks.pop(), found[0]
        begun = [handle for name in carried for handle in handles(liveins[name])]
        names = (n for n in ast.walk(node) if isinstance(n, ast.Name))
        set_here = {n.id for n in names if isinstance(n.ctx, ast.Store)}
        for name in set_here & walked.keys() - set(carried):
            if any(handle in begun for handle in handles(walked[name])):
                raise AssertionError(f"the loop at line {node.lineno} would lose {name}")
        return found

    generator._find_carries, generator._verify_loop_carried_variable = watched, noted
    try:
        yield
    finally:
        generator._find_carries, generator._verify_loop_carried_variable = find, verify


@contextmanager
def fake_device(capability: int = 90) -> Iterator[None]:
    """Within the block, Triton compiles for compute capability `capability` (90: sm_90a)."""
    before = driver._active
    driver.set_active(FakeDriver(capability))
    assemble, silent = CUDABackend.make_cubin, knobs.nvidia.dump_ptxas_log

    def noted(backend: CUDABackend, ptx: str, *rest: Any) -> bytes:
        with redirect_stdout(io.StringIO()) as said:
            cubin = assemble(backend, ptx, *rest)
        _reports[ptx] = said.getvalue()
        return cubin

    CUDABackend.make_cubin, knobs.nvidia.dump_ptxas_log = noted, True
    try:
        with loops_watched():
            yield
    finally:
        CUDABackend.make_cubin, knobs.nvidia.dump_ptxas_log = assemble, silent
        driver._active = before


@dataclass(frozen=True)
class MachineCode:
    """What the assembler made of a kernel: its SASS and the assembler's own report.

    dynamic_shared: bytes of shared memory that the launch asks for.
    """

    sass: str
    report: str
    dynamic_shared: int = 0

    def count(self, opcode: str) -> int:
        """How many instructions start with `opcode`, for example "HGMMA" or "LDS.128"."""
        return len(re.findall(rf"(?<![A-Z0-9.]){re.escape(opcode)}(?![A-Z0-9])", self.sass))

    @property
    def spill_bytes(self) -> int:
        """Bytes of registers stored to local memory."""
        return sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", self.report))

    @property
    def shared(self) -> int:
        """Bytes of shared memory, declared and asked for."""
        declared = max((int(n) for n in re.findall(r"(\d+) bytes smem", self.report)), default=0)
        return declared + self.dynamic_shared

    @property
    def registers(self) -> int:
        return max((int(n) for n in re.findall(r"Used (\d+) registers", self.report)), default=0)

    @property
    def serialized(self) -> bool:
        """Whether the assembler serialized wgmma instructions (its warning C7510 to C7519)."""
        return re.search(r"C751\d", self.report) is not None

    @property
    def undefined_descriptors(self) -> list[str]:
        """wgmma lines whose shared-memory descriptor is the undefined register URZ."""
        return [line for line in self.sass.splitlines() if "HGMMA" in line and "gdesc[URZ]" in line]


def machine_code(kernel: Any, arch: str = "sm_90a") -> MachineCode:
    """Disassemble a compiled kernel. Where Triton had it in its cache, its PTX is assembled again,
    for the assembler's report."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(kernel.asm["cubin"])
        sass = _run("nvdisasm", "-c", str(cubin))
        ptx = kernel.asm["ptx"]
        if ptx not in _reports:
            source, again = Path(folder, "kernel.ptx"), str(Path(folder, "again.cubin"))
            source.write_text(ptx)
            # The triton package has a second assembler for the chips that its first does not know.
            ptxas = "ptxas-blackwell" if arch.startswith("sm_1") else "ptxas"
            _reports[ptx] = _run(ptxas, "-v", f"--gpu-name={arch}", str(source), "-o", again)
    return MachineCode(sass, _reports[ptx], kernel.metadata.shared)


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run([str(TOOLS / tool), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{tool} failed: {done.stderr[:2000]}")
    return done.stdout + done.stderr
