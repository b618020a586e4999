"""Operations in C++ for the CPU: compiled on first use for this machine, absent where that fails.

Each module here gives calls on tensors for one source file under ``src``; the public operations in
``yocolm.ops`` choose between these and PyTorch's, and are what the models call.
"""
