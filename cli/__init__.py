"""The `minfer` command, installed as `minfer_cuda.cli`.

Modules here import each other relatively and import nothing heavy at their top, so that
`minfer --help` answers at once and `python -m cli` works from the source tree.
"""
