"""What an attention costs, in closed form and as compiled; which kernels serve it."""
