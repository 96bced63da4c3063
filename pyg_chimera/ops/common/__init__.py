"""What all operators share: declaration, checks, dispatch and the numba runtime."""
