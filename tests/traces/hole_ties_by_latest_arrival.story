All residents decode in step, so "least recently active" is a tie.
Rule: the latest arrival is the victim, whatever its id.

given
    block size 2
    worker w0 blocks 4 step 20
    store s0 budget 8
    gateway g0
    client c0 prompt 2 max 5
    client c1 prompt 2 max 5

story
    come c1
    see k1 -> w0 Admit c1
    come c0
    never k1 -> w0 SwapOut c1
    see k1 -> w0 SwapOut c0
    allow
    finish
    expect c1 tokens == 5
