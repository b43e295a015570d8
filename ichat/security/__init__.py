"""Permissions of callers, and how much each may use: keys, rules, rate limits, masked secrets."""
