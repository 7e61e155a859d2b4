/* A compute unit that runs one workgroup, wave by wave: what machine.py's tables say of each instruction is done here.

   Arithmetic is not: a step of kind JITTED calls the function that tinygrad's emulator made of AMD's pseudocode.
   Memory, lanes and matrices are, and every access is watched: its address, who else touched these bytes of LDS since
   the last barrier, and whether the registers that it reads were ever written, or are still on their way from memory.

   Registers are numbered s0 .. s127, v0 .. v255 (from 128), a0 .. a255 (from 384); sets of them are bits of WORDS
   words. The layout of DecodedInstruction, Wave and Machine is machine.py's. */
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { WORDS = 10, REGISTERS = 640, VGPR = 128, AGPR = 384, COUNTERS = 4, LANES = 64 };
enum { UNKNOWN, JITTED, SKIP, BARRIER, END, WAIT, ACCESS, SCALAR_LOAD, SHUFFLE, BPERMUTE, PERMLANE16, SWAP, MATRIX,
       DIV_SCALE, TRANSPOSE, GET_PC, SET_PC };
enum { GLOBAL, BUFFER, SCRATCH, LDS };
enum { VM, DS, STORE, SMEM };
enum { DONE, TRANSLATE, FAULT, LIMIT };
enum { OUTSIDE = 1, LDS_OUTSIDE, SCRATCH_OUTSIDE, UNALIGNED, RACE, UNDEFINED_ADDRESS, UNDEFINED_STORED, EARLY,
       LDS_EARLY, INACTIVE, NOT_TWIN, ASTRAY };
enum { NOWHERE = 0x7FFFFFFF }; /* where in LDS Triton sends what a wave too many loads: beyond LDS nothing is written */
enum { F32, BF16, F16, XF32 };
enum { PC = 256, TTMP8 = 116, EXEC = 126, SGPRS = 260, GARBAGE = 0x7FC1A5A5 };

typedef struct {
    int32_t kind, size;
    uint64_t reads[WORDS], writes[WORDS], address[WORDS]; /* address: those of reads that make an address */
    void (*code)(void *, void *, void *, void *, void *, void *);
    uint64_t at;         /* where the words of the instruction lie that code reads, if not at the pc */
    int32_t buffer[6];   /* which buffers code takes */
    int32_t counter;     /* what counts it while it is under way, or -1 */
    int32_t limits[4];   /* of a wait: how many may be under way, or -1 */
    int32_t space, store, bytes, sign, half, file, pairs, to_lds, offen; /* half: 1 low, 2 high half of the register */
    int32_t data, data2, vaddr, saddr, srsrc, soffset; /* registers of their own file, or -1 */
    int64_t offset, offset2;
    const int32_t *table; /* of a shuffle: the lane of each lane, or -1; of a matrix: a, b, rows, columns */
    uint64_t enabled;     /* of a shuffle: lanes that are written */
    int32_t bound, fetch;      /* of a shuffle: bound_ctrl, fetch_inactive */
    int32_t temporary, source; /* where the moved source lies, and its register */
    int32_t m, n, k, type, a, b, c, a_file, b_file, twin; /* of a matrix; c: as a source operand is encoded */
    int32_t select[2];    /* of a permlane16: scalar operands, or -1 and literal */
    uint32_t literal;
    int32_t source2, source3, sdst;
    uint64_t executed, conflicts;
    int32_t dual; /* two instructions in one: what each reads and writes */
    uint64_t half_reads[2][WORDS], half_writes[2][WORDS];
    uint64_t spared[2][WORDS]; /* registers whose low, or high, half is not read though the other one is */
    int32_t moved; /* of what a transfer writes: 1 the low, 2 the high half, 0 both, or what is no half of its own */
    int32_t verdict; /* of a comparison: where it puts its verdict on each lane, or -1 */
    uint64_t falses; /* how often it refused an active lane; of a wait: how often it brought a register */
} Step;

typedef struct {
    uint32_t s[SGPRS], v[256 * LANES], a[256 * LANES];
    uint64_t undefined[WORDS], flying[2][WORDS]; /* of low and high halves, as the next, and which */
    uint32_t when[2][REGISTERS], issued[COUNTERS], done[COUNTERS], at_barrier[COUNTERS];
    uint8_t which[2][REGISTERS];
    int32_t index, epoch, finished;
    uint16_t root[REGISTERS]; /* of an undefined register: the one that nothing wrote, and where that was read first */
    uint64_t misread[REGISTERS];
} Wave;

typedef struct {
    Step *steps;
    uint64_t base, count; /* of the code: its address, its words */
    int32_t lanes, waves, lds_bytes, scratch_bytes, ranges, m0, rdna4;
    uint32_t csr;
    Wave *wave;
    uint8_t *lds, *scratch;
    uint64_t *lo, *hi;
    uint64_t *readers, *writers; /* of each byte of LDS: bits of waves, valid in these epochs */
    int32_t *read, *written;
    uint8_t *blank;              /* of each byte of LDS: nothing defined was written */
    uint32_t *arrives; uint8_t *from, *by; /* of each byte of LDS: a transfer's number, its wave, its counter */
    int32_t current, races, most[COUNTERS]; /* most: transfers that a counter counts, or 0 */
    uint64_t taken, limit;
    int32_t fault, lane, bytes, reg, other;
    uint64_t pc, address;
    uint64_t moved[4]; /* bytes of global loads, stores, LDS loads, stores */
} Machine;

static uint32_t get_csr(void) {
#if defined(__x86_64__)
    return _mm_getcsr();
#elif defined(__aarch64__)
    uint64_t v; __asm__ __volatile__("mrs %0,fpcr" : "=r"(v)); return (uint32_t)v;
#else
    return 0;
#endif
}

static void set_csr(uint32_t value) {
#if defined(__x86_64__)
    _mm_setcsr(value);
#elif defined(__aarch64__)
    uint64_t v = value; __asm__ __volatile__("msr fpcr,%0" ::"r"(v));
#endif
}

static uint64_t active(const Machine *m, const Wave *w) {
    return m->lanes == 64 ? w->s[EXEC] | (uint64_t)w->s[EXEC + 1] << 32 : w->s[EXEC];
}

static uint64_t pc_of(const Wave *w) { return w->s[PC] | (uint64_t)w->s[PC + 1] << 32; }

static void set_pc(Wave *w, uint64_t pc) { w->s[PC] = (uint32_t)pc; w->s[PC + 1] = (uint32_t)(pc >> 32); }

static uint64_t pair(const Wave *w, int r) { return w->s[r] | (uint64_t)w->s[r + 1] << 32; }

static uint32_t *file(Wave *w, int which) { return which ? w->a : w->v; }

static int fails(Machine *m, int fault, int lane, uint64_t address, int bytes) {
    m->fault = fault; m->lane = lane; m->address = address; m->bytes = bytes;
    return 1;
}

static int overlaps(const uint64_t *x, const uint64_t *y) {
    for (int i = 0; i < WORDS; i++)
        if (x[i] & y[i]) return 1;
    return 0;
}

/* The first register of a set whose low, or high, half a transfer has not reached yet, or -1. What arrived leaves the
   set. spared: registers of which that half is not meant; but: a counter whose transfers are not meant, or -1. */
static int in_flight(Wave *w, int half, const uint64_t *set, const uint64_t *spared, int but) {
    for (int i = 0; i < WORDS; i++) {
        uint64_t left = w->flying[half][i] & set[i] & ~spared[i];
        while (left) {
            int r = i * 64 + __builtin_ctzll(left);
            left &= left - 1;
            if (w->when[half][r] > w->done[w->which[half][r]]) {
                if (w->which[half][r] != but) return r;
                continue;
            }
            w->flying[half][i] &= ~(1ull << (r & 63));
        }
    }
    return -1;
}

/* Whether a transfer writes the low (0) or the high half of its registers. */
static int moves(const Step *t, int half) { return !t->moved || t->moved == half + 1; }

/* The first register that an instruction reads or writes before what was asked for has reached it, or -1. */
static int too_early(Wave *w, const Step *t) {
    static const uint64_t none[WORDS];
    int in_order = t->counter == SMEM ? -1 : t->counter; /* what one counter counts arrives so, but scalar loads */
    for (int half = 0; half < 2; half++) {
        int early = in_flight(w, half, t->reads, t->spared[half], -1);
        if (early < 0 && moves(t, half)) early = in_flight(w, half, t->writes, none, in_order);
        if (early >= 0) return early;
    }
    return -1;
}

static void send(const Machine *m, Wave *w, const Step *t) {
    if (t->counter < 0) return;
    uint32_t number = ++w->issued[t->counter], most = (uint32_t)m->most[t->counter];
    if (most && number - w->done[t->counter] > most) w->done[t->counter] = number - most;
    if (t->store) return;
    for (int i = 0; i < WORDS; i++)
        for (uint64_t left = t->writes[i]; left; left &= left - 1) {
            int r = i * 64 + __builtin_ctzll(left);
            for (int half = 0; half < 2; half++) {
                if (!moves(t, half)) continue;
                w->when[half][r] = number; w->which[half][r] = (uint8_t)t->counter;
                w->flying[half][i] |= 1ull << (r & 63);
            }
        }
}

/* Registers are defined, or (`root` >= 0) as undefined as that one, which was read first at `pc`. */
static void mark(Wave *w, const uint64_t *writes, int root, uint64_t pc) {
    for (int i = 0; i < WORDS; i++) {
        w->undefined[i] = root >= 0 ? w->undefined[i] | writes[i] : w->undefined[i] & ~writes[i];
        for (uint64_t left = root >= 0 ? writes[i] : 0; left; left &= left - 1) {
            int r = i * 64 + __builtin_ctzll(left);
            w->root[r] = (uint16_t)root; w->misread[r] = pc;
        }
    }
}

/* The first undefined register of a set, or -1. */
static int blank_of(const Wave *w, const uint64_t *set) {
    for (int i = 0; i < WORDS; i++)
        if (w->undefined[i] & set[i]) return i * 64 + __builtin_ctzll(w->undefined[i] & set[i]);
    return -1;
}

static void define(Wave *w, const Step *t, int undefined, uint64_t pc) {
    mark(w, t->writes, undefined ? REGISTERS : -1, pc); /* LDS is no register */
}

/* What an instruction computes of a register that nothing wrote is as undefined. */
static void pass_on(Wave *w, const Step *t, uint64_t pc) {
    int root[2] = {-1, -1};
    uint64_t since[2] = {pc, pc};
    for (int half = 0; half <= t->dual; half++) {
        int from = blank_of(w, t->dual ? t->half_reads[half] : t->reads);
        if (from < 0) continue;
        root[half] = w->misread[from] ? w->root[from] : from;
        if (w->misread[from]) since[half] = w->misread[from];
    }
    for (int half = 0; half <= t->dual; half++)
        mark(w, t->dual ? t->half_writes[half] : t->writes, root[half], since[half]);
}

static int inside(const Machine *m, uint64_t address, int bytes) {
    for (int i = 0; i < m->ranges; i++)
        if (address >= m->lo[i] && address + bytes <= m->hi[i]) return 1;
    return 0;
}

/* ------------------------------------------------------------------------------------------------------------- LDS */

/* Whether two high bytes over one low byte are NaNs that differ in sign, which no law decides: of bfloat16 or float32,
   or the usual one of float16. */
static int sign_of_nan(uint8_t old, uint8_t new, uint8_t low) {
    uint32_t half = (new & 0x7Fu) << 8 | low;
    return (old ^ new) == 0x80 && (half > 0x7F80 || half == 0x7E00);
}

/* A wave touches bytes of LDS. Two waves at one byte since the same barrier race if one of them changes it; waves that
   hold copies of a row write the same value, which is none. `value`: what is stored there. */
static int touch(Machine *m, Wave *w, int lane, uint64_t at, int bytes, const uint8_t *value, int blank, int counter) {
    if (at + bytes > (uint64_t)m->lds_bytes) return fails(m, LDS_OUTSIDE, lane, at, bytes);
    uint64_t me = 1ull << w->index;
    for (int i = 0; i < bytes; i++) {
        uint64_t c = at + i;
        uint64_t wrote = m->written[c] == w->epoch ? m->writers[c] : 0;
        uint64_t did_read = m->read[c] == w->epoch ? m->readers[c] : 0;
        int changes = value && m->lds[c] != value[i] && !(i & 1 && sign_of_nan(m->lds[c], value[i], value[i - 1]));
        uint64_t others = value ? (changes ? (wrote | did_read) & ~me : 0) : wrote & me ? 0 : wrote;
        if (others && m->races) { m->other = __builtin_ctzll(others); return fails(m, RACE, lane, c, bytes); }
        if (m->arrives[c]) {
            Wave *sender = m->wave + m->from[c];
            uint32_t there = sender == w ? w->done[m->by[c]] : sender->at_barrier[m->by[c]];
            int own_order = sender == w && m->by[c] == DS;
            if (m->arrives[c] > there && !own_order && m->races) {
                m->other = m->from[c];
                return fails(m, LDS_EARLY, lane, c, bytes);
            }
        }
        if (value) {
            if (changes || !wrote) { /* a copy of what another wave wrote is no news */
                m->arrives[c] = w->issued[counter] + 1; m->from[c] = (uint8_t)w->index; m->by[c] = (uint8_t)counter;
            }
            m->writers[c] = wrote | me; m->written[c] = w->epoch;
            m->blank[c] = (uint8_t)blank;
            m->lds[c] = value[i];
        } else {
            m->readers[c] = did_read | me; m->read[c] = w->epoch;
        }
    }
    return 0;
}

/* How many more passes than without conflicts the banks of LDS need: words of one bank that lanes served together ask
   for one after the other. A model: 32 banks of 4 bytes, 32 lanes of 4 bytes, 16 of 8 or 8 of 16 at a time. */
static uint64_t conflicts(const uint64_t *at, uint64_t mask, int lanes, int bytes) {
    uint64_t more = 0;
    int words = bytes < 4 ? 1 : bytes / 4, group = 32 / words;
    if (group > lanes) group = lanes;
    for (int first = 0; first < lanes; first += group) {
        uint64_t seen[32][32]; int count[32] = {0}, most = 1;
        for (int l = first; l < first + group && l < lanes; l++)
            for (int i = 0; mask >> l & 1 && i < words; i++) {
                uint64_t word = at[l] / 4 + i; int bank = word % 32, known = 0;
                for (int j = 0; j < count[bank]; j++) known |= seen[bank][j] == word;
                if (!known && count[bank] < 32) seen[bank][count[bank]++] = word;
                if (count[bank] > most) most = count[bank];
            }
        more += most - 1;
    }
    return more;
}

/* ---------------------------------------------------------------------------------------------------------- memory */

static void put(Wave *w, const Machine *m, const Step *t, int reg, int lane, const uint8_t *raw) {
    uint32_t *out = file(w, t->file) + reg * m->lanes + lane;
    if (t->bytes >= 4) {
        for (int i = 0; i < t->bytes / 4; i++) memcpy(out + i * m->lanes, raw + 4 * i, 4);
        return;
    }
    uint32_t v = t->bytes == 1 ? raw[0] : raw[0] | raw[1] << 8;
    if (t->sign) v = t->bytes == 1 ? (uint32_t)(int32_t)(int8_t)v : (uint32_t)(int32_t)(int16_t)v;
    if (t->half == 1) v = (*out & 0xFFFF0000u) | (v & 0xFFFF);
    if (t->half == 2) v = (*out & 0xFFFFu) | v << 16;
    *out = v;
}

static void take(Wave *w, const Machine *m, const Step *t, int reg, int lane, uint8_t *raw) {
    const uint32_t *in = file(w, t->file) + reg * m->lanes + lane;
    if (t->bytes >= 4) {
        for (int i = 0; i < t->bytes / 4; i++) memcpy(raw + 4 * i, in + i * m->lanes, 4);
        return;
    }
    uint32_t v = t->half == 2 ? *in >> 16 : *in;
    memcpy(raw, &v, t->bytes);
}

static int access_lds(Machine *m, Wave *w, Step *t, uint64_t mask, int blank) {
    int all_blank = mask != 0;
    static uint8_t kept[2][LANES][16];
    uint64_t places[LANES];
    for (int p = 0; p < t->pairs; p++) {
        for (int l = 0; l < m->lanes; l++) {
            if (!(mask >> l & 1)) continue;
            uint64_t at = (uint32_t)(w->v[t->vaddr * m->lanes + l] + (p ? t->offset2 : t->offset)); /* bases may be negative */
            int aligned = t->bytes < 4 ? t->bytes : 4;
            places[l] = at;
            if (at % aligned) return fails(m, UNALIGNED, l, at, t->bytes);
            if (t->store) {
                uint8_t raw[16];
                take(w, m, t, p ? t->data2 : t->data, l, raw);
                if (touch(m, w, l, at, t->bytes, raw, blank, t->counter)) return 1;
            } else {
                if (touch(m, w, l, at, t->bytes, 0, 0, -1)) return 1;
                for (int i = 0; i < t->bytes; i++) all_blank &= m->blank[at + i];
                memcpy(kept[p][l], m->lds + at, t->bytes);
            }
            m->moved[t->store ? 3 : 2] += t->bytes;
        }
        t->conflicts += conflicts(places, mask, m->lanes, t->bytes);
    }
    if (!t->store) { /* the address may lie in a register that is written */
        for (int p = 0; p < t->pairs; p++)
            for (int l = 0; l < m->lanes; l++)
                if (mask >> l & 1) put(w, m, t, t->data + p * (t->bytes / 4), l, kept[p][l]);
        define(w, t, all_blank, pc_of(w));
    }
    return 0;
}

static int access_memory(Machine *m, Wave *w, Step *t) {
    uint64_t mask = active(m, w);
    int blank = t->store && overlaps(w->undefined, t->reads);
    if (overlaps(w->undefined, t->address) && mask) return fails(m, UNDEFINED_ADDRESS, 0, 0, t->bytes);
    if (t->space == LDS) return access_lds(m, w, t, mask, blank);
    if (blank && mask && t->space != SCRATCH) return fails(m, UNDEFINED_STORED, 0, 0, t->bytes);
    static uint8_t kept[LANES][16];
    uint64_t base = t->space == BUFFER ? pair(w, t->srsrc) & 0xFFFFFFFFFFFFull : 0;
    uint64_t records = t->space == BUFFER ? w->s[t->srsrc + 2] : 0, soffset = t->soffset >= 0 ? w->s[t->soffset] : 0;
    for (int l = 0; l < m->lanes; l++) {
        if (!(mask >> l & 1)) continue;
        uint64_t low = t->vaddr >= 0 ? w->v[t->vaddr * m->lanes + l] : 0, at;
        uint8_t *place, raw[16] = {0};
        int reaches = 1;
        if (t->space == BUFFER) {
            uint64_t off = (t->offen ? low : 0) + t->offset;
            at = base + soffset + off;
            reaches = off + t->bytes <= records && off < (1ull << 32);
        } else if (t->space == SCRATCH) {
            int64_t scalar = t->saddr >= 0 ? (int32_t)w->s[t->saddr] : 0;
            int64_t off = t->offset + scalar + (t->offen ? (int32_t)low : 0);
            if (off < 0 || off + t->bytes > m->scratch_bytes)
                return fails(m, SCRATCH_OUTSIDE, l, (uint64_t)off, t->bytes);
            at = (uint64_t)(m->scratch + ((uint64_t)w->index * m->lanes + l) * m->scratch_bytes + off);
        } else {
            uint64_t high = t->saddr < 0 ? w->v[(t->vaddr + 1) * m->lanes + l] : 0;
            at = (t->saddr >= 0 ? pair(w, t->saddr) + low : low | high << 32) + (uint64_t)t->offset;
        }
        if (reaches && t->space != SCRATCH && !inside(m, at, t->bytes)) return fails(m, OUTSIDE, l, at, t->bytes);
        place = (uint8_t *)at;
        if (t->space != SCRATCH) m->moved[t->store] += t->bytes * reaches;
        if (t->store) {
            take(w, m, t, t->data, l, raw);
            if (reaches) memcpy(place, raw, t->bytes);
            continue;
        }
        if (reaches) memcpy(raw, place, t->bytes);
        if (t->to_lds) {
            if (w->s[m->m0] == NOWHERE) continue;
            uint64_t to = (w->s[m->m0] & 0x3FFFF) + t->offset + (uint64_t)l * t->bytes;
            if (touch(m, w, l, to, t->bytes, raw, 0, t->counter)) return 1;
        } else memcpy(kept[l], raw, 16);
    }
    if (!t->store && !t->to_lds) {
        for (int l = 0; l < m->lanes; l++)
            if (mask >> l & 1) put(w, m, t, t->data, l, kept[l]);
        define(w, t, 0, 0);
    }
    return 0;
}

static int scalar_load(Machine *m, Wave *w, Step *t) {
    if (overlaps(w->undefined, t->address)) return fails(m, UNDEFINED_ADDRESS, 0, 0, t->bytes);
    uint64_t off = (uint64_t)t->offset + (t->soffset >= 0 ? w->s[t->soffset] : 0);
    uint64_t base = pair(w, t->saddr), at = t->space == BUFFER ? (base & 0xFFFFFFFFFFFFull) + off : base + off;
    uint32_t got[16] = {0};
    at &= ~3ull;
    if (t->space != BUFFER || off + t->bytes <= w->s[t->saddr + 2]) {
        if (!inside(m, at, t->bytes)) return fails(m, OUTSIDE, -1, at, t->bytes);
        memcpy(got, (void *)at, t->bytes);
        m->moved[0] += t->bytes;
    }
    memcpy(w->s + t->data, got, t->bytes);
    define(w, t, 0, 0);
    return 0;
}

/* Lanes in groups of 16 hold 4 rows of 16 halves, 4 lanes a row: each lane gets a column. */
static int transpose(Machine *m, Wave *w, Step *t) {
    uint16_t got[LANES][4];
    if (active(m, w) != ~0ull) return fails(m, INACTIVE, 0, 0, 0);
    for (int l = 0; l < LANES; l++) {
        uint64_t at = (uint32_t)(w->v[t->vaddr * LANES + l] + t->offset);
        if (touch(m, w, l, at, 8, 0, 0, -1)) return 1;
        memcpy(got[l], m->lds + at, 8);
    }
    for (int l = 0; l < LANES; l++)
        for (int i = 0; i < 4; i++) {
            uint32_t *out = file(w, t->file) + (t->data + i / 2) * LANES + l;
            uint32_t v = got[(l & ~15) + 4 * i + (l & 15) / 4][l & 3];
            *out = i & 1 ? (*out & 0xFFFF) | v << 16 : (*out & 0xFFFF0000u) | v;
        }
    define(w, t, 0, 0);
    return 0;
}

/* ----------------------------------------------------------------------------------------------------------- lanes */

static void call(Wave *w, const Machine *m, const Step *t) {
    void *all[6] = {w->s, w->v, 0, m->lds, m->scratch, m->lanes == 64 ? w->a : w->v};
    const int32_t *b = t->buffer;
    t->code(all[b[0]], all[b[1]], all[b[2]], all[b[3]], all[b[4]], all[b[5]]);
}

/* The instruction on a source whose lanes were moved, in the lanes that the move reaches. */
static void shuffle(Machine *m, Wave *w, const Step *t) {
    uint64_t mask = active(m, w), write = 0, pc = pc_of(w);
    uint32_t old[LANES], *moved = w->v + t->temporary * m->lanes, source[LANES];
    uint32_t exec[2] = {w->s[EXEC], w->s[EXEC + 1]};
    memcpy(old, moved, 4 * m->lanes);
    memcpy(source, w->v + t->source * m->lanes, 4 * m->lanes);
    for (int l = 0; l < m->lanes; l++) {
        int from = t->table[l], valid = from >= 0 && (t->fetch || mask >> from & 1);
        moved[l] = valid ? source[from] : 0;
        if (valid || t->bound) write |= mask & t->enabled & 1ull << l;
    }
    w->s[EXEC] = (uint32_t)write;
    if (m->lanes == 64) w->s[EXEC + 1] = (uint32_t)(write >> 32);
    set_pc(w, t->at);
    call(w, m, t);
    set_pc(w, pc);
    w->s[EXEC] = exec[0];
    if (m->lanes == 64) w->s[EXEC + 1] = exec[1];
    memcpy(moved, old, 4 * m->lanes);
}

static void bpermute(Machine *m, Wave *w, const Step *t) {
    uint64_t mask = active(m, w);
    uint32_t got[LANES] = {0};
    for (int l = 0; l < m->lanes; l++) {
        int to = (int)((w->v[t->vaddr * m->lanes + l] + t->offset) >> 2) % m->lanes;
        uint32_t there = w->v[t->source * m->lanes + (t->store ? l : to)];
        if (!t->store) got[l] = mask >> to & 1 ? there : 0;
        else if (mask >> l & 1) got[to] = there;
    }
    for (int l = 0; l < m->lanes; l++)
        if (mask >> l & 1) w->v[t->data * m->lanes + l] = got[l];
}

static void permlane16(Machine *m, Wave *w, const Step *t) {
    uint64_t mask = active(m, w), select = 0;
    uint32_t source[LANES];
    for (int i = 0; i < 2; i++) select |= (uint64_t)(t->select[i] < 0 ? t->literal : w->s[t->select[i]]) << 32 * i;
    memcpy(source, w->v + t->source * m->lanes, 4 * m->lanes);
    for (int l = 0; l < m->lanes; l++) {
        int from = ((l & ~15) ^ (int)t->offset) + (int)(select >> 4 * (l & 15) & 15);
        if (!(mask >> l & 1)) continue;
        if (t->fetch || mask >> from & 1) w->v[t->data * m->lanes + l] = source[from];
        else if (t->bound) w->v[t->data * m->lanes + l] = 0;
    }
}

/* v_permlane{16,32}_swap: the odd halves of one register for the even halves of the other. */
static void swap_halves(Machine *m, Wave *w, const Step *t) {
    int h = (int)t->offset;
    uint32_t *d = w->v + t->data * m->lanes, *s = w->v + t->source * m->lanes;
    for (int l = 0; l < m->lanes; l++)
        if (l % (2 * h) < h) { uint32_t x = s[l]; s[l] = d[l + h]; d[l + h] = x; }
}

/* -------------------------------------------------------------------------------------------------------- matrices */

static double from_half(uint16_t h) {
    int e = h >> 10 & 31, f = h & 1023;
    double v = e == 31 ? (f ? NAN : INFINITY) : e ? ldexp(1024 + f, e - 25) : ldexp(f, -24);
    return h >> 15 ? -v : v;
}

static double as_float(uint32_t bits) { float f; memcpy(&f, &bits, 4); return f; }

static double element(const uint32_t *regs, int type, int32_t at) {
    if (type == F32) return as_float(regs[at]);
    if (type == XF32) return as_float((regs[at] + 0x1000) & 0xFFFFE000u);
    uint16_t h = (uint16_t)(regs[at / 2] >> 16 * (at & 1));
    return type == BF16 ? as_float((uint32_t)h << 16) : from_half(h);
}

/* D = A B + C; the sums in float64 are rounded once. The tables say where each element lies. */
static int matrix(Machine *m, Wave *w, const Step *t) {
    static double a[32 * 64], b[32 * 64];
    static uint32_t result[16 * LANES];
    const int32_t *a_at = t->table, *b_at = a_at + t->m * t->k, *rows = b_at + t->n * t->k;
    const int32_t outs = t->m * t->n / m->lanes, *cols = rows + outs * m->lanes;
    const uint32_t *ra = file(w, t->a_file) + t->a * m->lanes, *rb = file(w, t->b_file) + t->b * m->lanes;
    uint32_t *out = file(w, t->file) + t->data * m->lanes;
    uint64_t full = m->lanes == 64 ? ~0ull : 0xFFFFFFFFull;
    if (m->lanes == 32 && active(m, w) != full) return fails(m, INACTIVE, 0, 0, 0);
    for (int r = 0; t->twin && r < t->twin; r++)
        for (int l = 0; l < 16; l++)
            if (ra[r * 32 + l] != ra[r * 32 + l + 16] || rb[r * 32 + l] != rb[r * 32 + l + 16])
                return fails(m, NOT_TWIN, l, 0, 0);
    for (int i = 0; i < t->m * t->k; i++) a[i] = element(ra, t->type, a_at[i]);
    for (int i = 0; i < t->n * t->k; i++) b[i] = element(rb, t->type, b_at[i]);
    for (int i = 0; i < outs * m->lanes; i++) {
        double sum = as_float(t->c >= 256 ? file(w, t->file)[(t->c - 256) * m->lanes + i] : w->s[t->c]);
        const double *x = a + rows[i] * t->k, *y = b + cols[i] * t->k;
        double dot = 0;
        for (int k = 0; k < t->k; k++) dot += x[k] * y[k];
        float f = (float)(dot + sum);
        memcpy(result + i, &f, 4); /* kept apart: D may overlap A or B */
    }
    memcpy(out, result, 4 * outs * m->lanes);
    return 0;
}

/* -------------------------------------------------------------------------------------------------------- division */

static uint32_t operand(const Wave *w, const Machine *m, const Step *t, int code, int lane) {
    return code >= 256 ? w->v[(code - 256) * m->lanes + lane] : code == 255 ? t->literal : w->s[code];
}

/* v_div_scale_f32 as AMD's pseudocode means it: scaled so that refinement by fma, v_div_fmas and v_div_fixup give the
   quotient. */
static void div_scale(Machine *m, Wave *w, const Step *t) {
    uint64_t mask = active(m, w), flags = 0;
    for (int l = 0; l < m->lanes; l++) {
        if (!(mask >> l & 1)) continue;
        uint32_t b0 = operand(w, m, t, t->source, l);
        uint32_t bd = operand(w, m, t, t->source2, l), bn = operand(w, m, t, t->source3, l);
        double x = as_float(b0), d = as_float(bd), n = as_float(bn);
        int ed = bd >> 23 & 255, en = bn >> 23 & 255, is_d = b0 == bd, is_n = b0 == bn, power = 0, flag = 0;
        double q = fabs(n / d), r = fabs(1 / d);
        int tiny_q = q > 0 && q < 0x1p-126, tiny_r = r > 0 && r < 0x1p-126;
        float out;
        if (d == 0 || n == 0) x = NAN;
        else if (en - ed >= 96) power = 64 * is_d, flag = 1;
        else if (ed == 0) power = 64;
        else if (tiny_r && tiny_q) power = -64 * is_d, flag = 1;
        else if (tiny_r) power = -64;
        else if (tiny_q) power = 64 * is_n, flag = 1;
        else if (en <= 23) power = 64;
        out = (float)ldexp(x, power);
        memcpy(w->v + t->data * m->lanes + l, &out, 4);
        flags |= (uint64_t)flag << l;
    }
    if (t->sdst < 0) return;
    w->s[t->sdst] = (uint32_t)flags;
    if (m->lanes == 64) w->s[t->sdst + 1] = (uint32_t)(flags >> 32);
}

/* ------------------------------------------------------------------------------------------------------- the waves */

static void wait_for(Wave *w, Step *t) {
    const int32_t *limits = t->limits;
    int news = 0;
    uint32_t before[COUNTERS];
    memcpy(before, w->done, sizeof before);
    for (int c = 0; c < COUNTERS; c++) {
        if (limits[c] < 0) continue;
        /* scalar loads come in any order: none is known to be there until all are */
        uint32_t there = c == SMEM && limits[c] ? 0 : w->issued[c] > (uint32_t)limits[c] ? w->issued[c] - limits[c] : 0;
        if (there > w->done[c]) w->done[c] = there;
    }
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < WORDS; i++)
            for (uint64_t left = w->flying[half][i]; left; left &= left - 1) {
                int r = i * 64 + __builtin_ctzll(left), by = w->which[half][r];
                news |= w->when[half][r] > before[by] && w->when[half][r] <= w->done[by];
            }
    t->falses += news;
}

/* One instruction; nonzero: a fault. */
static int step(Machine *m, Wave *w, Step *t) {
    uint64_t pc = pc_of(w);
    int own = 0, early = too_early(w, t);
    if (early >= 0) {
        m->reg = early;
        return fails(m, EARLY, 0, 0, 0);
    }
    switch (t->kind) {
    case JITTED:
        if (t->at) set_pc(w, t->at);
        call(w, m, t);
        if (t->at) set_pc(w, pc); else own = 1;
        if (t->verdict >= 0) {
            uint64_t yes = w->s[t->verdict] | (m->lanes == 64 ? (uint64_t)w->s[t->verdict + 1] << 32 : 0);
            t->falses += (active(m, w) & ~yes) != 0;
        }
        break;
    case WAIT: wait_for(w, t); break;
    case ACCESS: if (access_memory(m, w, t)) return 1; break;
    case SCALAR_LOAD: if (scalar_load(m, w, t)) return 1; break;
    case TRANSPOSE: if (transpose(m, w, t)) return 1; break;
    case SHUFFLE: shuffle(m, w, t); break;
    case BPERMUTE: bpermute(m, w, t); break;
    case PERMLANE16: permlane16(m, w, t); break;
    case SWAP: swap_halves(m, w, t); break;
    case MATRIX: if (matrix(m, w, t)) return 1; break;
    case DIV_SCALE: div_scale(m, w, t); break;
    case GET_PC: w->s[t->sdst] = (uint32_t)(pc + 4); w->s[t->sdst + 1] = (uint32_t)(pc + 4 >> 32); break;
    case SET_PC: set_pc(w, pair(w, t->source)); own = 1; break;
    }
    if (t->kind != ACCESS && t->kind != SCALAR_LOAD && t->kind != TRANSPOSE) pass_on(w, t, pc);
    send(m, w, t);
    if (!own) set_pc(w, pc + t->size);
    return 0;
}

/* All waves of a program, in turn up to each barrier; begins again where it was left to have an instruction translated.
   */ static int run_waves(Machine *m) {
    for (;;) {
        for (; m->current < m->waves; m->current++) {
            Wave *w = m->wave + m->current;
            while (!w->finished) {
                uint64_t pc = m->pc = pc_of(w), word = (pc - m->base) / 4;
                if (pc < m->base || word >= m->count) return fails(m, ASTRAY, 0, pc, 0), FAULT;
                Step *t = m->steps + word;
                if (t->kind == UNKNOWN) return TRANSLATE;
                if (m->taken++ >= m->limit) return LIMIT;
                t->executed++;
                if (t->kind == END) { w->finished = 1; break; }
                if (step(m, w, t)) return FAULT;
                if (t->kind == BARRIER) {
                    memcpy(w->at_barrier, w->done, sizeof w->done);
                    w->epoch++;
                    break;
                }
            }
        }
        int left = 0;
        for (int i = 0; i < m->waves; i++) left += !m->wave[i].finished;
        if (!left) return DONE;
        m->current = 0;
    }
}

int run(Machine *m) {
    uint32_t saved = get_csr();
    if (m->csr) set_csr(saved | m->csr);
    int why = run_waves(m);
    set_csr(saved);
    return why;
}

/* Waves and LDS as a program finds them: garbage, but for what the descriptor of the kernel asks for. `state`: s0 to
   s127
   as they begin, and which of them are defined. */
void begin(Machine *m, uint64_t entry, const uint32_t *state, const uint64_t *defined) {
    memset(m->lds, 0xA5, m->lds_bytes);
    memset(m->blank, 1, m->lds_bytes);
    memset(m->arrives, 0, 4ull * m->lds_bytes);
    memset(m->read, 0xFF, 4ull * m->lds_bytes);
    memset(m->written, 0xFF, 4ull * m->lds_bytes);
    if (m->scratch_bytes) memset(m->scratch, 0xA5, (uint64_t)m->scratch_bytes * m->lanes * m->waves);
    m->current = 0;
    for (int i = 0; i < m->waves; i++) {
        Wave *w = m->wave + i;
        memset(w, 0, sizeof *w);
        w->index = i;
        for (int r = 0; r < 256 * LANES; r++) w->v[r] = w->a[r] = GARBAGE;
        memcpy(w->s, state, 4 * SGPRS);
        memset(w->undefined, 0xFF, sizeof w->undefined);
        for (int j = 0; j < 2; j++) w->undefined[j] = ~defined[j];
        w->undefined[VGPR / 64] &= ~1ull;
        for (int l = 0; l < m->lanes; l++) w->v[l] = (uint32_t)(i * m->lanes + l);
        if (m->rdna4) w->s[TTMP8] = (uint32_t)i << 25; /* which wave of the program it is */
        w->s[EXEC] = 0xFFFFFFFFu;
        w->s[EXEC + 1] = m->lanes == 64 ? 0xFFFFFFFFu : 0;
        set_pc(w, entry);
    }
}

uint64_t size_of(int which) { return which == 0 ? sizeof(Step) : which == 1 ? sizeof(Wave) : sizeof(Machine); }
