"""Peak memory while a model loads, against the size of its weights.

python benchmarks/load_memory.py [--model smollm2-135m] [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import json
import resource

from paceline.models.loading import open_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    checkpoint = open_checkpoint(args.model, dtype=args.dtype, device="cpu")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    model = checkpoint.load()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    weights = model.info.weight_bytes
    print(
        json.dumps(
            {
                "model": args.model,
                "dtype": args.dtype,
                "weight_bytes": weights,
                "before_bytes": before,
                "peak_bytes": peak,
                "allowed_bytes": int(1.3 * weights + 1e9),
            }
        )
    )


if __name__ == "__main__":
    main()
