A pool of three blocks, a prompt of three, a growth reserve of one.
Rule: the growth reserve is waived on an empty worker.

given
    block size 2
    worker w0 blocks 3
    store s0 budget 8
    gateway g0
    client c0 prompt 5 max 1
    set growth_reserve_blocks 1

story
    come c0
    see k1 -> w0 Admit c0
    finish
    expect c0 tokens == 1
