"""Tasks: complete experiments on weight graphs, from data to report.

This room holds the experiments: it builds collections of trained networks, trains models on their
weights and reports how well they do. It uses the core and the converters, and neither of them
knows about it. From data to report:

- `sources`: images and point clouds, read from local files
- `zoo`: many small networks that are trained on them at once, in a store
- `models`: neural functionals and baselines that read networks
- `training`: options, data, Lightning, the folder of a run
- `reports`: figures, the page of a run, tables over runs

A task is a module of its own: `regress`, `classify`, `classify_inr`, `edit_inr` or
`winning_tickets`. `train` lists them by name and holds the commands that train and apply models;
further commands are in `zoo.zoo_commands`, `edit`, `prune` and `demo`.
"""
