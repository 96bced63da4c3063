"""The definitions: dense matrices or loops, differentiated by autograd, for tests."""
