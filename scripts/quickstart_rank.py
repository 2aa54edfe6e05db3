"""One rank of the quick start: the Llama example several times in one process, with other arguments each time.

Started by quickstart.py through `accelerate launch`; its only argument is a JSON list of [title, arguments].
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
from pathlib import Path

from accelerate.state import AcceleratorState, GradientState

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "llama" / "train.py"


def main() -> None:
    """Run the example once for each entry of the list."""
    for title, arguments in json.loads(sys.argv[1]):
        if os.environ.get("RANK", "0") == "0":
            print(f"\n=== {title} ===", flush=True)
        sys.argv = [str(EXAMPLE), *arguments]
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        # The next run starts as a new process would: no Accelerator, no engine in memory.
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        gc.collect()


if __name__ == "__main__":
    main()
