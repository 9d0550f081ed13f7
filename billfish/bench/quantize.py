"""What INT4 costs in perplexity, by the method that made it, on the CPU.

    billfish bench quantize --out FILE [--model MODEL] [--sequences N]

Every row is one run of `billfish quantize` into a folder that is thrown away; the perplexities are
those it reports. All runs use the same pieces of the same texts.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from billfish.bench import record
from billfish.checkpoint.locate import DEMO_MODEL
from billfish.export.quantize import QuantizeOptions, quantize_checkpoint

CASES: tuple[dict[str, Any], ...] = (
    {"method": "rtn"},
    {"method": "gptq"},
    {"method": "gptq", "act_order": False},
    {"method": "rtn", "symmetric": False},
    {"method": "gptq", "symmetric": False},
)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="billfish bench quantize", description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--held-sequences", type=int, default=8)
    given = parser.parse_args(arguments)
    head = record.environment("billfish bench quantize " + " ".join(arguments))
    rows: list[dict[str, Any]] = []
    for case in CASES:
        options = QuantizeOptions(
            num_sequences=given.sequences,
            num_held=given.held_sequences,
            requantize=True,  # the demo model's original is not at hand
            **case,
        )
        with tempfile.TemporaryDirectory() as folder:
            report = quantize_checkpoint(given.model, Path(folder) / "out", options)
        gptq = options.method == "gptq"
        rows.append(
            {
                "model": given.model,
                "method": options.method,
                "group": options.group_size,
                "symmetric": options.symmetric,
                "act_order": options.act_order if gptq else None,
                "damping": options.damping if gptq else None,
                "calibration_tokens": report.tokens,
                "held_tokens": report.held_tokens,
                "perplexity_before": round(report.perplexity_before, 4),
                "perplexity": round(report.perplexity_after, 4),
                "mebibytes": round(report.nbytes / 2**20, 1),
            }
        )
        print(rows[-1], flush=True)
        record.write(given.out, head, rows)
