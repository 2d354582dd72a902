A request that may need twelve blocks, and a worker with eight that is empty.
Rule: it is placed only where the whole pool holds prompt and max_new_tokens.

given
    block size 2
    worker w0 blocks 8
    worker w1 blocks 12 step 20
    store s0 budget 32
    gateway g0
    client c0 prompt 6 max 18
    client c1 prompt 6 max 18

story
    never k1 -> w0 Admit c0
    never k1 -> w0 Admit c1
    never k1 -> w0 SwapIn c0
    never k1 -> w0 SwapIn c1
    come c0 c1
    finish
    expect c0 tokens == 18
    expect c1 tokens == 18
