The bytes in the store change between the commit and the copy back.
Rule: the reader verifies the bytes that it copied, and computes again if they are wrong.

given
    block size 8
    worker w0 blocks 3 step 20
    store s0 budget 8
    gateway g0
    client c0 prompt 17 max 6
    client c1 prompt 17 max 6

story
    come c0
    see w0 -> g0 Tokens c0 index=0
    come c1
    see k1 -> w0 Admit c1
    rot s0
    see w0 hears FetchDone status=bad_payload
    finish
    expect w0 recomputed == 1
    expect c0 tokens == 6
