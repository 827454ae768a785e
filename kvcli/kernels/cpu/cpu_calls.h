/* A list of calls, made one after the other: a step whose calls are the same ones as before needs no Python between them.
 * Included by cpu.c; calls.py writes the lists. */

#define CALL_ARGUMENTS 12

typedef union { /* whole numbers and addresses; floats are doubles here */
    int64_t i;
    double f;
} kv_arg;

typedef struct {
    int64_t function;
    kv_arg a[CALL_ARGUMENTS];
} kv_call;

#define P(n) ((void *)(intptr_t)c->a[n].i)
#define I(n) (c->a[n].i)
#define R(n) ((float)c->a[n].f)
#define CALLS(F) \
    F(kv_matmul, (P(0), I(1), P(2), I(3), I(4), I(5), P(6), I(7), I(8))) \
    F(kv_matmul_experts, (P(0), I(1), I(2), P(3), I(4), I(5), P(6), I(7), I(8), P(9), I(10))) \
    F(kv_route, (P(0), I(1), P(2), P(3), P(4), P(5))) \
    F(kv_mix, (P(0), P(1), I(2), I(3), I(4), P(5))) \
    F(kv_rows, (P(0), P(1), I(2), I(3), R(4), P(5))) \
    F(kv_norm, (P(0), I(1), P(2), P(3), I(4), R(5), I(6), I(7), P(8), I(9))) \
    F(kv_add, (P(0), I(1), P(2), I(3), R(4), I(5), I(6))) \
    F(kv_rope, (P(0), I(1), I(2), I(3), I(4), I(5), P(6), P(7))) \
    F(kv_activate, (P(0), I(1), I(2), I(3), I(4), P(5))) \
    F(kv_rotate, (P(0), I(1), I(2), I(3), I(4))) \
    F(kv_store, (P(0), I(1), P(2), I(3), P(4), I(5))) \
    F(kv_attention, (P(0), I(1), P(2), I(3), I(4), I(5), R(6), R(7), P(8), P(9), I(10), P(11))) \
    F(kv_short_conv, (P(0), I(1), P(2), P(3), I(4), I(5), P(6), I(7), P(8))) \
    F(kv_mamba, (P(0), I(1), P(2), P(3), I(4), P(5), P(6))) \
    F(kv_delta_net, (P(0), I(1), P(2), P(3), I(4), P(5), P(6)))

#define NUMBER(name, arguments) NUMBER_##name,
enum { CALLS(NUMBER) N_CALLS };
#undef NUMBER

/* The number of a function in lists; -1 = lists cannot have it. */
int64_t kv_call_number(const char *name) {
#define TEXT(name, arguments) #name,
    static const char *const names[] = {CALLS(TEXT)};
#undef TEXT
    for (int64_t i = 0; i < N_CALLS; i++)
        if (!strcmp(names[i], name)) return i;
    return -1;
}

void kv_run(const kv_call *calls, int64_t n) {
#define MAKE(name, arguments) case NUMBER_##name: name arguments; break;
    for (const kv_call *c = calls; c < calls + n; c++)
        switch (c->function) {
            CALLS(MAKE)
        }
#undef MAKE
}

#undef P
#undef I
#undef R
#undef CALLS
