"""Shared by all operators: declaration, checks, dispatch and kernel runtimes."""
