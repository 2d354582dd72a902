Two workers are full, and a request has been swapped out for one that came later. It waits until
something ends: no room is made for who wants to come back, or two would take turns for ever.

given
    block size 8
    worker w0 blocks 3 step 50
    worker w1 blocks 3 step 50
    store s0 budget 32
    gateway g0
    client c0 prompt 17 max 7
    client c1 prompt 17 max 7
    client c2 prompt 17 max 7

story
    come c0
    see w0 -> g0 Tokens c0 index=0
    come c1
    see w1 -> g0 Tokens c1 index=0
    come c2
    see k1 -> w0 SwapOut c0
    see k1 -> w0 Admit c2
    never k1 -> w1 SwapOut c1
    see k1 -> w1 SwapIn c0
    allow
    finish
    expect c0 tokens == 7
    expect c1 tokens == 7
    expect c2 tokens == 7
