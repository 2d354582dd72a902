A worker is killed in the middle of a resume: the payload is still there, and is used again.

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
    see k1 -> w0 SwapIn c0
    see s0 -> w0 GetGrant c0
    kill w0
    expect s0 tickets_committed == 1
    start w0
    see k1 -> w0 SwapIn c0
    see w0 hears FetchDone status=ok
    finish
