"""Parts of the benchmark of the console."""
