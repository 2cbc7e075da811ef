"""`python -m cli` in the source tree, `python -m minfer_cuda.cli` once installed."""

from .main import main

main()
