"""What `billfish bench throughput` takes; nothing is timed."""

import pytest

from billfish.bench import throughput


@pytest.mark.parametrize(
    ("option", "value"),
    [("--peers", "torch"), ("--batches", "x"), ("--batches", "1,0"), ("--rounds", "0"),
     ("--prompt", "-1"), ("--output", "1.5")],
)  # fmt: skip
def test_options_that_are_wrong_are_refused(option, value, capsys):
    with pytest.raises(SystemExit):
        throughput.main(["--out", "x.json", option, value])
    assert option in capsys.readouterr().err.splitlines()[-1]
