"""One function of JAX for one mesh: traced, exported, and cut if the mesh joins islands."""
