"""The task of a diffusion transformer: data, objective, diffusion and samples."""
