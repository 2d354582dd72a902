The normal life: admitted, swapped out for a newcomer, resumed, finished.
A pool of exactly three blocks; each request needs all three.

given
    block size 8
    worker w0 blocks 3 step 20
    store s0 budget 8
    gateway g0
    client c0 prompt 17 max 6
    client c1 prompt 17 max 6

story
    come c0
    see g0 -> k1 GatewayReport
    see k1 -> w0 Admit c0
    see w0 -> g0 Attach c0
    see g0 -> w0 Attached c0
    see w0 -> g0 Tokens c0 index=0
    expect w0 has c0 decode
    come c1
    see k1 -> s0 Reserve c0
    see s0 -> k1 StoreReply c0 status=ok
    see k1 -> w0 SwapOut c0
    see w0 -> s0 BeginPut c0
    see w0 -> s0 FinishPut c0
    see w0 -> s0 Commit c0
    see s0 -> w0 StoreReply c0 status=ok
    expect w0 lacks c0
    expect s0 tickets_committed == 1
    see k1 -> w0 Admit c1
    see c1 hears Got
    see w0 -> g0 Tokens c1 index=5
    see k1 -> w0 SwapIn c0
    see w0 -> s0 BeginGet c0
    see w0 hears FetchDone status=ok
    see k1 -> s0 Release c0
    finish
    expect c0 tokens == 6
    expect c1 tokens == 6
    expect w0 requests_swapped_total == 1
    expect w0 requests_resumed_total == 1
    expect w0 recomputed == 0
