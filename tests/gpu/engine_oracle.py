"""Writes smollm2_float32.json: what the demo model says in float32 on a CPU, which is exact against
transformers (tests/e2e/test_against_oracle.py). Run as `python -m tests.gpu.engine_oracle`.
"""

import json
from pathlib import Path

from billfish import LLM, SamplingParams
from tests.e2e.prompts import PROMPTS

FILE = Path(__file__).with_name("smollm2_float32.json")
TOKENS = 64


def main() -> None:
    llm = LLM("smollm2", dtype="float32", device="cpu")
    params = SamplingParams(max_tokens=TOKENS, temperature=0, logprobs=0, ignore_eos=True)
    rows = []
    for output in llm.generate(list(PROMPTS), params):
        assert output.logprobs is not None
        rows.append(
            {
                "prompt": list(output.prompt_token_ids),
                "tokens": list(output.token_ids),
                "logprobs": [round(each.logprob, 5) for each in output.logprobs],
            }
        )
    FILE.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
