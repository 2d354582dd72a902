What has just come back would be swapped out again for the next newcomer, and so on for ever.
Rule: nobody is a victim who has not advanced min_residency tokens since the resume.

given
    block size 8
    worker w0 blocks 3 step 20
    store s0 budget 16
    gateway g0
    client c0 prompt 17 max 7
    client c1 prompt 17 max 4
    client c2 prompt 17 max 4
    set min_residency_tokens 16

story
    come c0
    see w0 -> g0 Tokens c0 index=0
    come c1
    see k1 -> w0 SwapIn c0
    see w0 hears FetchDone status=ok
    never k1 -> w0 SwapOut c0
    come c2
    see w0 -> g0 Tokens c0 index=6
    finish
    expect c0 tokens == 7
    expect c2 tokens == 4
