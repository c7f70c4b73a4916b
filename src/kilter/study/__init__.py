"""Studies: many runs, one command, one honest table.

A study is a grid of runs (`plan`, `reading`), carried out by forked processes (`runner`), tuned on validation rows (`tuning`),
gathered over seeds (`results`, `measures`) and written down (`conduct`). `commands` is its part of the command line.
"""
