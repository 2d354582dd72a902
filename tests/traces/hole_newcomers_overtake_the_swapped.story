A request waits in the store; others come after it and would fit only if room were made.
Rule: no room is made for an admission while anything waits to come back, and what waits in the
store is resumed before anyone new is admitted.

given
    block size 8
    worker w0 blocks 3 step 20
    store s0 budget 32
    gateway g0
    client c0 prompt 17 max 6
    client c1 prompt 17 max 6
    client c2 prompt 17 max 6
    client c3 prompt 17 max 6

story
    come c0
    see w0 -> g0 Tokens c0 index=0
    come c1
    see k1 -> w0 Admit c1
    see w0 -> g0 Tokens c1 index=0
    never k1 -> w0 SwapOut c1
    never k1 -> w0 Admit c2
    never k1 -> w0 Admit c3
    come c2 c3
    see k1 -> w0 SwapIn c0
    allow
    finish
    expect c0 tokens == 6
    expect c3 tokens == 6
