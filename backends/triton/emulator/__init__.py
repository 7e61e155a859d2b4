"""AMD machine code of the kernels here, executed with no AMD GPU: the profile ``emulated``.

A launch is compiled for a real target, by the compiler and with the options of a real launch, and its code object is
run wave by wave. What an instruction computes comes from AMD's own pseudocode, which the emulator of tinygrad (its
source tree, MIT licence) turns into C and compiles; memory, lanes and matrix instructions are done in ``machine.c``
after AMD's ISA documents, by tables that are kept here. Every access must lie in the launch's tensors, in LDS or in
scratch memory; two waves that touch a byte of LDS with no barrier between race; a register that nothing wrote must not
reach an address or memory; and nothing may be read before an ``s_waitcnt`` says that it is there.

    tree.py          where tinygrad's tree and clang are, and what to do where they are not
    code_object.py   what a compiled kernel asks for: its code, its arguments, its registers
    decode.py        one instruction: which of machine.c's steps it is, and what it reads and writes
    accesses.py, lanes.py, matrices.py, waits.py    the tables that steps are made of
    machine.py       a workgroup: memory, waves, and what went wrong there
    profile.py       launches that run here
"""
