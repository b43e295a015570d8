"""The command `doctor`: it examines a set-up, and says what is wrong with it and what to do.

Each module has one part: functions that read facts from the system, and functions that make findings of facts.
"""
