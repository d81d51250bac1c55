// What a search does between the embedding and the logits and after them, in float32, for few rows, without gradients.
//
// B sentences; W hypotheses of each; R = B * W rows; D d_model; H heads; K d_k; V d_v
// keys (B, H, K, room) and values (B, H, room, V): `room` is a multiple of LANES, and so many columns of it are taken

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

// Numbers of a vector register, and the rows of a product that are computed together: as many as there are registers for
#if defined __AVX512F__
#define LANES 16
#define ROWS 8
#elif defined __AVX__
#define LANES 8
#define ROWS 4
#else
#define LANES 4
#define ROWS 4
#endif
#define PANEL (2 * LANES)  // outputs of a product that are computed together
#define STRIDE 64
#define CHUNK 128
#define LOG2_E 1.44269504f

typedef float Vector __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));

const int64_t panel = PANEL;

typedef struct {
    const float *weight;  // (panels, inputs, PANEL)
    const float *bias;    // (panels * PANEL,)
    int64_t inputs, outputs;
} Product;

typedef struct {
    const float *weight, *bias;
    float epsilon;
} Norm;

typedef struct {
    Product query_key_value, output, hidden, from_hidden;
    Product query, memory_output, memory_key_value;  // in a decoder only
    Norm after_self, after_feed_forward, after_memory;
    int64_t heads, d_k, d_v, widest;  // widest: the most outputs of a product
} Layer;

static inline float larger(float x, float y) {
    return x > y ? x : y;
}

// 2^x for x <= 0, but for an error of 2e-7 of it; unlike the library's, a loop of it becomes one of vector instructions
static inline float power_of_2(float x) {
    x = larger(x, -126);
    const float whole = rintf(x), y = (x - whole) * 0.693147181f;
    const float power = 1 + y * (1 + y * (1 / 2.f + y * (1 / 6.f + y * (1 / 24.f + y * (1 / 120.f + y * (1 / 720.f))))));
    const uint32_t bits = (uint32_t)((int32_t)whole + 127) << 23;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return power * scale;
}

// x (rows, inputs) times the weight, plus the bias, as (rows, outputs).
static void multiply(float *restrict out, const float *restrict x, const Product *product, int64_t rows) {
    const int64_t inputs = product->inputs, outputs = product->outputs;
    const float *restrict weight = product->weight;
    for (int64_t first = 0; first < outputs; first += PANEL, weight += inputs * PANEL) {
        const int64_t width = outputs - first < PANEL ? outputs - first : PANEL;
        for (int64_t row = 0; row < rows; row += ROWS) {
            const int64_t height = rows - row < ROWS ? rows - row : ROWS;
            const float *of[ROWS];
            Vector sums[ROWS][2];
            for (int64_t i = 0; i < ROWS; i++) {
                of[i] = x + (row + (i < height ? i : 0)) * inputs;
                for (int64_t j = 0; j < 2; j++)
                    sums[i][j] = *(const Vector *)(product->bias + first + j * LANES);
            }
            for (int64_t input = 0; input < inputs; input++)
                for (int64_t i = 0; i < ROWS; i++)
                    for (int64_t j = 0; j < 2; j++)
                        sums[i][j] += of[i][input] * ((const Vector *)(weight + input * PANEL))[j];
            for (int64_t i = 0; i < height; i++)
                memcpy(out + (row + i) * outputs + first, sums[i], width * sizeof *out);
        }
    }
}

// Queries, the first columns of (R, stride), look at those columns where `mask` (B, W or 1, columns) is 0, if there is a
// mask. `out` is (R, H * V), `scratch` has room for a number, a weight and a column's number of each column.
static void attend(
    float *restrict out, const float *restrict queries, int64_t stride, const float *restrict keys,
    const float *restrict values, const float *restrict mask, int64_t mask_width, float *restrict scratch,
    const Layer *layer, int64_t sentences, int64_t width, int64_t columns, int64_t room
) {
    const int64_t heads = layer->heads, d_k = layer->d_k, d_v = layer->d_v;
    const float scale = LOG2_E / sqrtf((float)d_k);
    float *restrict scores = scratch, *restrict weights = scratch + room;
    int32_t *restrict seen = (int32_t *)(scratch + 2 * room);
    for (int64_t row = 0; row < sentences * width; row++) {
        const int64_t sentence = row / width;
        const float *forbid = mask ? mask + (sentence * mask_width + row % width % mask_width) * columns : 0;
        int64_t count = 0;
        for (int64_t column = 0; column < columns; column++) {
            seen[count] = (int32_t)column;
            count += !forbid || forbid[column] == 0;
        }
        for (int64_t head = 0; head < heads; head++, out += d_v) {
            const float *query = queries + row * stride + head * d_k;
            const float *key = keys + (sentence * heads + head) * d_k * room;
            const float *value = values + (sentence * heads + head) * room * d_v;
            for (int64_t column = 0; column < columns; column += LANES) {
                Vector sums = {0};
                for (int64_t k = 0; k < d_k; k++)
                    sums += query[k] * *(const Vector *)(key + k * room + column);
                *(Vector *)(scores + column) = sums;
            }
            float top = -FLT_MAX, sum = 0;
            for (int64_t i = 0; i < count; i++) {
                weights[i] = scores[seen[i]];
                top = larger(weights[i], top);
            }
            // Whole vectors: the rest of the last one comes to nothing
            for (int64_t i = count; i % LANES; i++)
                weights[i] = -FLT_MAX;
            for (int64_t start = 0; start < count; start += LANES)
                for (int64_t i = start; i < start + LANES; i++) {
                    weights[i] = power_of_2((weights[i] - top) * scale);
                    sum += weights[i];
                }
            int64_t v = 0;
            for (; v + LANES <= d_v; v += LANES) {
                Vector sums = {0};
                for (int64_t i = 0; i < count; i++)
                    sums += weights[i] * *(const Vector *)(value + seen[i] * d_v + v);
                *(Vector *)(out + v) = sums / sum;
            }
            for (; v < d_v; v++) {
                out[v] = 0;
                for (int64_t i = 0; i < count; i++)
                    out[v] += weights[i] * value[seen[i] * d_v + v];
                out[v] /= sum;
            }
        }
    }
}

// Puts keys and values, the first columns of rows (R, stride), into the last W columns.
static void append(
    float *restrict keys, float *restrict values, const float *restrict rows, int64_t stride, const Layer *layer,
    int64_t sentences, int64_t width, int64_t columns, int64_t room
) {
    const int64_t heads = layer->heads, d_k = layer->d_k, d_v = layer->d_v;
    for (int64_t row = 0; row < sentences * width; row++, rows += stride) {
        const int64_t column = columns - width + row % width;
        for (int64_t head = 0; head < heads; head++) {
            const int64_t place = row / width * heads + head;
            for (int64_t k = 0; k < d_k; k++)
                keys[(place * d_k + k) * room + column] = rows[head * d_k + k];
            memcpy(values + (place * room + column) * d_v, rows + heads * d_k + head * d_v, d_v * sizeof *rows);
        }
    }
}

// x becomes LayerNorm(x + y).
static void add_and_norm(float *restrict x, const float *restrict y, const Norm *norm, int64_t rows, int64_t width) {
    for (int64_t row = 0; row < rows; row++, x += width, y += width) {
        float sum = 0, squares = 0;
        for (int64_t i = 0; i < width; i++) {
            x[i] += y[i];
            sum += x[i];
        }
        const float mean = sum / width;
        for (int64_t i = 0; i < width; i++)
            squares += (x[i] - mean) * (x[i] - mean);
        const float scale = 1 / sqrtf(squares / width + norm->epsilon);
        for (int64_t i = 0; i < width; i++)
            x[i] = (x[i] - mean) * scale * norm->weight[i] + norm->bias[i];
    }
}

// x (rows, D) becomes the output of the last sub-layer.
static void feed_forward(float *x, const Layer *layer, float *wide, float *found, int64_t rows) {
    multiply(wide, x, &layer->hidden, rows);
    for (int64_t i = 0; i < rows * layer->hidden.outputs; i++)
        wide[i] = larger(wide[i], 0);
    multiply(found, wide, &layer->from_hidden, rows);
    add_and_norm(x, found, &layer->after_feed_forward, rows, layer->output.outputs);
}

// x (tokens, D) of sentences between `offsets` becomes the encoder layer's output. `scratch` has room for the widest
// product, heads and x of each row, for keys and values of one sentence in `room` columns, and what `attend` wants.
void encode_layer(
    float *x, const Layer *layer, const int64_t *offsets, float *scratch, int64_t sentences, int64_t room
) {
    const int64_t rows = offsets[sentences], d_model = layer->output.outputs, d_values = layer->output.inputs;
    const int64_t stride = layer->query_key_value.outputs;
    float *wide = scratch, *heads = wide + rows * layer->widest, *found = heads + rows * d_values;
    float *keys = found + rows * d_model, *values = keys + layer->heads * layer->d_k * room;
    float *rest = values + d_values * room;

    multiply(wide, x, &layer->query_key_value, rows);
    for (int64_t i = 0; i < sentences; i++) {
        const int64_t first = offsets[i], length = offsets[i + 1] - first;
        const float *own = wide + first * stride;
        append(keys, values, own + layer->heads * layer->d_k, stride, layer, 1, length, length, room);
        attend(heads + first * d_values, own, stride, keys, values, 0, 0, rest, layer, 1, length, length, room);
    }
    multiply(found, heads, &layer->output, rows);
    add_and_norm(x, found, &layer->after_self, rows, d_model);

    // Few rows at a time stay in the cache
    for (int64_t row = 0; row < rows; row += CHUNK)
        feed_forward(x + row * d_model, layer, wide, found, rows - row < CHUNK ? rows - row : CHUNK);
}

// What a decoder layer looks at in the encoder's output x (tokens, D). `scratch` has room for its keys and values.
void remember(
    float *keys, float *values, const float *x, const Layer *layer, const int64_t *offsets, float *scratch,
    int64_t sentences, int64_t room
) {
    const int64_t stride = layer->memory_key_value.outputs;
    multiply(scratch, x, &layer->memory_key_value, offsets[sentences]);
    for (int64_t i = 0; i < sentences; i++) {
        const int64_t length = offsets[i + 1] - offsets[i];
        append(keys, values, scratch + offsets[i] * stride, stride, layer, 1, length, length, room);
        keys += layer->heads * layer->d_k * room;
        values += layer->heads * layer->d_v * room;
    }
}

// x (R, D) becomes the decoder layer's output; the last W of the past's columns are its own. `scratch` has room for the
// widest product, heads and x of each row, and what `attend` wants.
void decode_layer(
    float *x, const Layer *layer, float *past_keys, float *past_values, const float *past_mask, int64_t past_columns,
    int64_t past_room, const float *memory_keys, const float *memory_values, const float *memory_mask,
    int64_t memory_columns, int64_t memory_room, float *scratch, int64_t sentences, int64_t width
) {
    const int64_t rows = sentences * width, d_model = layer->output.outputs, d_values = layer->output.inputs;
    const int64_t stride = layer->query_key_value.outputs;
    float *wide = scratch, *heads = wide + rows * layer->widest, *found = heads + rows * d_values;
    float *rest = found + rows * d_model;

    multiply(wide, x, &layer->query_key_value, rows);
    append(
        past_keys, past_values, wide + layer->heads * layer->d_k, stride, layer, sentences, width, past_columns,
        past_room
    );
    attend(
        heads, wide, stride, past_keys, past_values, past_mask, width, rest, layer, sentences, width, past_columns,
        past_room
    );
    multiply(found, heads, &layer->output, rows);
    add_and_norm(x, found, &layer->after_self, rows, d_model);

    multiply(wide, x, &layer->query, rows);
    attend(
        heads, wide, layer->query.outputs, memory_keys, memory_values, memory_mask, 1, rest, layer, sentences, width,
        memory_columns, memory_room
    );
    multiply(found, heads, &layer->memory_output, rows);
    add_and_norm(x, found, &layer->after_memory, rows, d_model);

    feed_forward(x, layer, wide, found, rows);
}

// The `count` best of all continuations (B, W, words) of hypotheses with log probabilities `alive` (B, W): the log
// probabilities, hypotheses and tokens (B, count), best first.
void best_continuations(
    float *best, int64_t *of, int64_t *tokens, const float *restrict logits, const float *alive, int64_t sentences,
    int64_t width, int64_t words, int64_t count
) {
    const int64_t whole = words / STRIDE * STRIDE;
    for (int64_t sentence = 0; sentence < sentences; sentence++, best += count, of += count, tokens += count) {
        for (int64_t i = 0; i < count; i++)
            best[i] = -INFINITY, of[i] = tokens[i] = 0;
        for (int64_t hypothesis = 0; hypothesis < width; hypothesis++, alive++, logits += words) {
            // Of the words whose numbers leave the same remainder: the best pairs are among those with the best maxima
            float maxima[STRIDE], sums[STRIDE] = {0}, top = -FLT_MAX, sum = 0;
            for (int64_t i = 0; i < STRIDE; i++)
                maxima[i] = -FLT_MAX;
            for (int64_t start = 0; start < whole; start += STRIDE)
                for (int64_t i = 0; i < STRIDE; i++)
                    maxima[i] = larger(logits[start + i], maxima[i]);
            for (int64_t i = 0; i < words - whole; i++)
                maxima[i] = larger(logits[whole + i], maxima[i]);
            for (int64_t i = 0; i < STRIDE; i++)
                top = larger(maxima[i], top);
            for (int64_t start = 0; start < whole; start += STRIDE)
                for (int64_t i = 0; i < STRIDE; i++)
                    sums[i] += power_of_2((logits[start + i] - top) * LOG2_E);
            for (int64_t i = 0; i < words - whole; i++)
                sums[i] += power_of_2((logits[whole + i] - top) * LOG2_E);
            for (int64_t i = 0; i < STRIDE; i++)
                sum += sums[i];
            const float offset = *alive - top - logf(sum);
            for (int64_t i = 0; i < STRIDE; i++) {
                if (!(maxima[i] + offset > best[count - 1]))
                    continue;
                for (int64_t token = i; token < words; token += STRIDE) {
                    const float found = logits[token] + offset;
                    if (!(found > best[count - 1]))
                        continue;
                    int64_t place = count - 1;
                    for (; place && best[place - 1] < found; place--)
                        best[place] = best[place - 1], of[place] = of[place - 1], tokens[place] = tokens[place - 1];
                    best[place] = found, of[place] = hypothesis, tokens[place] = token;
                }
            }
        }
    }
}
