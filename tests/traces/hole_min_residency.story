A resumed request would be swapped out again at once, and so on for ever.
Rule: none is a victim that has not advanced min_residency tokens since its resume.

given
    block size 2
    worker w0 blocks 4 step 20
    store s0 budget 16
    gateway g0
    client c0 prompt 2 max 6
    client c1 prompt 2 max 6
    client c2 prompt 2 max 6
    set min_residency_tokens 4

story
    come c0 c1 c2
    finish
    expect c0 tokens == 6
    expect c1 tokens == 6
    expect c2 tokens == 6
    expect w0 swaps_out <= 6
