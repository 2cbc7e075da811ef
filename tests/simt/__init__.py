"""The kernels of cuda/ on a CPU: SimtDevice runs them under the launchers, with every access checked."""
