"""The command `doctor`: it examines a set-up, and reports each problem with its remedy.

Each module has a part: functions that read facts from the system, and functions that make findings of facts.
"""
