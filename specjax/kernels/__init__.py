"""Operations with kernels of their own; a folder has the meaning and the speed."""
