"""Who may do what, and how much of it: keys, rules, rate limits, what is masked."""
