"""Studies: many runs, one command, one table.

A study is a grid of runs (`schema`, `grid`), tuned on validation rows (`tuning`), carried out by forked processes (`runner`),
gathered over seeds (`results`, `statistics`) and shown as tables (`tables`). `pipeline` puts these steps together.
"""
