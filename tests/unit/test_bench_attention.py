"""The sizes that the attention benchmark divides its times by."""

from collections import Counter

import pytest

pytest.importorskip("triton")

from billfish.bench import attention
from billfish.bench.attention_ablation import DECODE, PREFILL
from billfish.bench.attention_cases import Case, cases


def brute_force_flops(case: Case) -> int:
    seen = 0
    for new, total in zip(case.query_lens, case.seq_lens, strict=True):
        seen += sum(1 for q in range(total - new, total) for k in range(total) if k <= q)
    return 2 * 2 * 128 * case.heads_q * seen


@pytest.mark.parametrize(
    ("seq_lens", "query_lens"), [((7,), (7,)), ((9, 4), (1, 1)), ((20, 5, 1), (6, 5, 1))]
)
def test_work_of_a_case(seq_lens, query_lens):
    case = Case("decode", "", 8, 2, seq_lens, query_lens)
    assert case.flops == brute_force_flops(case)
    assert case.kv_bytes == sum(seq_lens) * 2 * 128 * 2 * 2


def test_uniform_means_attention_without_blocks_can_do_it():
    assert Case("decode", "", 8, 2, (9, 9), (1, 1)).uniform
    assert Case("prefill", "", 8, 2, (9, 9), (9, 9)).uniform
    assert not Case("chunk", "", 8, 2, (9, 9), (3, 3)).uniform
    assert not Case("ragged", "", 8, 2, (9, 8), (1, 1)).uniform


def test_cases_are_distinct_and_cover_the_modes():
    listed = cases((32, 8))
    assert len({case.name for case in listed}) == len(listed)
    assert Counter(case.mode for case in listed) == {
        "decode": 15,
        "ragged": 3,
        "prefill": 4,
        "chunk": 4,
        "mixed": 1,
    }
    for case in listed:
        assert all(new <= n for new, n in zip(case.query_lens, case.seq_lens, strict=True))


def test_ablation_names_real_cases():
    assert {*DECODE, *PREFILL} <= {case.name for case in cases((32, 8))}


@pytest.mark.parametrize(
    "options",
    [
        ["--modes", "decode,encode"], ["--modes", ""], ["--ablation", "--only", "1024"],
        ["--ablation", "--peers", "here"], ["--nothing"],
    ],
)  # fmt: skip
def test_options_that_would_have_no_effect_are_refused(options, capsys):
    with pytest.raises(SystemExit) as ended:
        attention.main(["--out", "x.json", *options])
    assert ended.value.code == 2
    assert "error" in capsys.readouterr().err


def test_every_mode_has_cases():
    assert {case.mode for case in cases((32, 8))} | {"move"} == set(attention.MODES)


@pytest.mark.parametrize("heads", ["x", "32", "32/8/2", "7/2", "8/0", "", "32/8,"])
def test_numbers_of_heads(heads, capsys):
    with pytest.raises(SystemExit):
        attention.main(["--out", "x.json", "--heads", heads])
    assert "--heads: invalid" in capsys.readouterr().err


def test_no_case_at_all_is_told(capsys):
    with pytest.raises(SystemExit):
        attention.main(["--out", "x.json", "--modes", "decode", "--only", "no such case"])
    assert "no case is left" in capsys.readouterr().err
