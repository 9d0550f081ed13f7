"""The code of docs/write-a-kernel.md, run in Triton's interpreter as it stands there.

Run by test_tutorial.py in a process of its own. By hand:
TRITON_INTERPRET=1 pytest tests/kernels/tutorial_triton.py
"""

import importlib.util

import pytest

from billfish.bench import tutorial
from tests.kernels.test_tutorial import code_blocks


def test_the_page_runs(tmp_path):
    """All blocks in order, one program; it checks itself. Triton reads the text of kernels, so it
    has to be a file."""
    path = tmp_path / "page.py"
    path.write_text("\n\n".join(code_blocks()))
    spec = importlib.util.spec_from_file_location("page", path)
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    assert page.tiled(page.x, page.scale, page.bias).shape == (129, 64)


@pytest.mark.parametrize("step", tutorial.STEPS)
def test_what_is_timed_is_right(step):
    layer, _ = tutorial.STEPS[step]
    inputs = tutorial.draw(70, 150, "cpu")
    assert tutorial.error_of(layer, inputs) < tutorial.TOLERANCE
    wrong = tutorial.error_of(lambda x, scale, bias: layer(x, scale, 1.02 * bias), inputs)
    assert wrong > tutorial.TOLERANCE
