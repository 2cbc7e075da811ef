"""cuda/*.cu on a CPU: SimtDevice runs the kernels under their launchers and checks each access."""
