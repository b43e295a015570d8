"""The words of system errors in messages."""

import pytest

from ichat.texts import reason_of


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(13, "permission denied", "/secret"), "Permission denied"),
        (OSError(-2, "Name or service not known"), "Name or service not known"),
        (OSError("All attempts failed."), "All attempts failed"),
    ],
)
def test_a_system_error_has_a_reason_without_number_and_path(error, reason):
    assert reason_of(error) == reason
