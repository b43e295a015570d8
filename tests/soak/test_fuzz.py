"""Long runs of the fuzzer: mutated requests at the front door, and mutated responses through the relays."""

import os
import random
import types

import pytest
import trio
from fuzz_front_door import run

SEED = int(os.environ.get("ICHAT_FUZZ_SEED") or random.randrange(10**9))


@pytest.mark.parametrize(("what", "keys"), [("requests", True), ("responses", False)], ids=["front door", "relays"])
def test_every_random_request_is_answered_or_refused(tmp_path, what, keys):
    """For as many minutes as ICHAT_FUZZ_MINUTES says (10), from the seed ICHAT_FUZZ_SEED (one that is printed)."""
    minutes = float(os.environ.get("ICHAT_FUZZ_MINUTES", "10"))
    print(f"\nICHAT_FUZZ_SEED={SEED}: {what} for {minutes:g} minutes", flush=True)
    args = types.SimpleNamespace(seed=SEED, minutes=minutes, what=what, keys=keys, only=None)
    lines, is_well = trio.run(run, args, tmp_path)
    print("\n".join(lines))
    assert is_well, f"ICHAT_FUZZ_SEED={SEED}"
