The order to resume is late; the controller looks at the sequence again and again meanwhile.
Rule: the ticket is released only when a report shows the sequence running without it.

given
    block size 8
    worker w0 blocks 3 step 20 copy 30
    store s0 budget 8
    gateway g0
    client c0 prompt 17 max 6
    client c1 prompt 17 max 6

story
    come c0
    see w0 -> g0 Tokens c0 index=0
    come c1
    hold k1 -> w0 SwapIn c0
    hold k1 -> w0 SwapIn c0
    see w0 -> g0 Tokens c1 index=5
    never k1 -> s0 Release c0
    run 600
    expect s0 tickets_committed == 1
    release
    see s0 -> w0 GetGrant c0
    run 10
    expect s0 tickets_committed == 1
    see w0 hears FetchDone status=ok
    allow
    see k1 -> s0 Release c0
    finish
    expect w0 recomputed == 0
    expect c0 tokens == 6
