"""A form has one reading: ours, and that of every other parser that reads what the gateway passes on.

    ./build test slow -k fuzz_forms

`ICHAT_FUZZ_MINUTES` says how long it goes on (10), and `ICHAT_FUZZ_SEED` repeats a run; it makes at least 200 000 forms.
"""

import os
import secrets
import time

from support.forms import Verdicts, judge_many

FORMS_MIN = 200_000


def test_fuzz_forms():
    """Neither honest clients' forms nor broken ones are read by anybody in another way than by the gateway."""
    seed = os.environ.get("ICHAT_FUZZ_SEED") or secrets.token_hex(4)
    ends_at = time.monotonic() + 60 * float(os.environ.get("ICHAT_FUZZ_MINUTES", "10"))
    print(f"ICHAT_FUZZ_SEED={seed}", flush=True)
    verdicts, number = Verdicts(), 0
    while number < FORMS_MIN or time.monotonic() < ends_at:
        judge_many(seed, range(number, number + 1000), verdicts)
        number += 1000
    print(f"{number} forms: {verdicts}")
    assert min(verdicts.rewritten, verdicts.refused, verdicts.steering, verdicts.two_readings) > 0
