"""Many experiments in a row: a command or Optuna proposes, any number of workers try."""
