"""``python -m benchmarks``: every benchmark, results to benchmarks/results."""

from .unet import main

main()
