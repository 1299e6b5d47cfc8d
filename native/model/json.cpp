#include "model/json.h"

#include <charconv>
#include <cmath>

#include "model/refuse.h"

namespace kd::json {

const char* kind_name(Kind kind) {
    switch (kind) {
        case Kind::null: return "null";
        case Kind::boolean: return "true or false";
        case Kind::integer: return "a number";
        case Kind::real: return "a number";
        case Kind::string: return "a string";
        case Kind::array: return "an array";
        case Kind::object: return "an object";
    }
    return "a value";
}

Cursor::Cursor(std::string_view text, std::string where) : text_(text), where_(std::move(where)) {}

void Cursor::error(size_t offset, const std::string& what) const {
    std::string path;
    for (int i = 0; i < depth_; ++i)
        if (keys_[i]) path += (path.empty() ? "" : ".") + model::printable(*keys_[i], 60);
    model::refuse(where_, model::printable(what, 400) + " at byte " + std::to_string(offset) +
                              (path.empty() ? "" : ", in " + model::printable(path, 150)) +
                              "; the file is not JSON as kd reads it, fetch it again");
}

void Cursor::space() {
    while (next_ < text_.size()) {
        const char c = text_[next_];
        if (c != ' ' && c != '\t' && c != '\n' && c != '\r') return;
        ++next_;
    }
}

Kind Cursor::peek() {
    space();
    if (next_ == text_.size()) error(next_, "the text ends where a value should stand");
    switch (const char c = text_[next_]) {
        case 'n': return Kind::null;
        case 't':
        case 'f': return Kind::boolean;
        case '"': return Kind::string;
        case '[': return Kind::array;
        case '{': return Kind::object;
        default:
            if (c == '-' || (c >= '0' && c <= '9')) return Kind::integer;
            if (text_.substr(next_).starts_with("\xEF\xBB\xBF"))
                error(next_, "a byte order mark stands where a value should (save the file without it)");
            error(next_, "no value can start like this");
    }
}

void Cursor::expect(Kind kind) {
    const Kind found = peek();
    if (found != kind) error(next_, std::string(kind_name(found)) + " stands where " + kind_name(kind) + " should");
}

void Cursor::word(const char* text) {
    const std::string_view wanted(text);
    if (text_.substr(next_, wanted.size()) != wanted) error(next_, "misspelt " + std::string(wanted));
    next_ += wanted.size();
}

void Cursor::null() {
    expect(Kind::null);
    word("null");
}

bool Cursor::boolean() {
    expect(Kind::boolean);
    const bool value = text_[next_] == 't';
    word(value ? "true" : "false");
    return value;
}

Cursor::Number Cursor::number() {
    expect(Kind::integer);
    const size_t begin = next_;
    const auto digit = [&] { return next_ < text_.size() && text_[next_] >= '0' && text_[next_] <= '9'; };
    const auto at = [&](char c) { return next_ < text_.size() && text_[next_] == c; };
    const auto digits = [&] {
        if (!digit()) error(next_, "a digit is missing in a number");
        while (digit()) ++next_;
    };
    if (at('-')) ++next_;
    if (at('0')) {
        ++next_;
        if (digit()) error(begin, "a number starts with a zero");
    } else {
        digits();
    }
    Number n;
    n.is_integer = true;
    if (at('.')) {
        n.is_integer = false;
        ++next_;
        digits();
    }
    if (at('e') || at('E')) {
        n.is_integer = false;
        ++next_;
        if (at('+') || at('-')) ++next_;
        digits();
    }
    const char* first = text_.data() + begin;
    const char* last = text_.data() + next_;
    if (next_ - begin > kMaxNumberBytes) error(begin, "a number has too many digits");
    if (n.is_integer) {
        if (std::from_chars(first, last, n.integer).ec != std::errc()) error(begin, "an integer does not fit 64 bits");
        n.real = static_cast<double>(n.integer);
    } else if (std::from_chars(first, last, n.real).ec != std::errc() || !std::isfinite(n.real)) {
        error(begin, "a number does not fit a double");
    }
    return n;
}

int64_t Cursor::integer() {
    expect(Kind::integer);
    const size_t at = next_;
    const Number n = number();
    if (!n.is_integer) error(at, "a number has a fraction or an exponent where an integer should stand");
    return n.integer;
}

uint32_t Cursor::hex4() {
    uint32_t value = 0;
    for (int i = 0; i < 4; ++i, ++next_) {
        const char c = next_ < text_.size() ? text_[next_] : '?';
        const int digit = c >= '0' && c <= '9'   ? c - '0'
                          : c >= 'a' && c <= 'f' ? c - 'a' + 10
                          : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                                 : -1;
        if (digit < 0) error(next_, "four hexadecimal digits should follow \\u");
        value = value * 16 + static_cast<uint32_t>(digit);
    }
    return value;
}

static void append_utf8(std::string& to, uint32_t c) {
    const auto tail = [&](int shift) { to += static_cast<char>(0x80 | ((c >> shift) & 0x3f)); };
    if (c < 0x80) {
        to += static_cast<char>(c);
    } else if (c < 0x800) {
        to += static_cast<char>(0xc0 | (c >> 6));
        tail(0);
    } else if (c < 0x10000) {
        to += static_cast<char>(0xe0 | (c >> 12));
        tail(6), tail(0);
    } else {
        to += static_cast<char>(0xf0 | (c >> 18));
        tail(12), tail(6), tail(0);
    }
}

void Cursor::escape(std::string& to) {
    const size_t begin = next_++;
    const char c = next_ < text_.size() ? text_[next_++] : '?';
    switch (c) {
        case '"':
        case '\\':
        case '/': to += c; return;
        case 'b': to += '\b'; return;
        case 'f': to += '\f'; return;
        case 'n': to += '\n'; return;
        case 'r': to += '\r'; return;
        case 't': to += '\t'; return;
        case 'u': break;
        default: error(begin, "no such escape");
    }
    uint32_t code = hex4();
    if (code >= 0xd800 && code < 0xdc00 && text_.substr(next_, 2) == "\\u") {
        next_ += 2;
        const uint32_t low = hex4();
        if (low < 0xdc00 || low > 0xdfff) error(begin, "a surrogate stands alone");
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    } else if (code >= 0xd800 && code <= 0xdfff) {
        error(begin, "a surrogate stands alone");
    }
    if (code == 0) error(begin, "a string holds a zero character");
    append_utf8(to, code);
}

void Cursor::utf8(std::string& to) {
    const size_t begin = next_;
    const auto lead = static_cast<unsigned char>(text_[next_++]);
    const int tails = lead < 0xc2 ? -1 : lead < 0xe0 ? 1 : lead < 0xf0 ? 2 : lead < 0xf5 ? 3 : -1;
    if (tails < 0) error(begin, "a string is not UTF-8");
    uint32_t code = lead & (0x3fu >> tails);
    for (int i = 0; i < tails; ++i) {
        const auto c = static_cast<unsigned char>(next_ < text_.size() ? text_[next_] : 0);
        if ((c & 0xc0) != 0x80) error(begin, "a string is not UTF-8");
        code = (code << 6) | (c & 0x3fu);
        ++next_;
    }
    const bool longer = (tails == 2 && code < 0x800) || (tails == 3 && code < 0x10000);
    if (longer || code > 0x10ffff || (code >= 0xd800 && code <= 0xdfff)) error(begin, "a string is not UTF-8");
    to.append(text_, begin, next_ - begin);
}

std::string Cursor::string() {
    expect(Kind::string);
    const size_t begin = next_++;
    std::string s;
    for (;;) {
        if (next_ == text_.size()) error(begin, "a string has no end");
        const auto c = static_cast<unsigned char>(text_[next_]);
        if (c == '"') {
            ++next_;
            return s;
        }
        if (c < 0x20) error(next_, "a string holds a bare control character");
        if (c == '\\') {
            escape(s);
        } else if (c < 0x80) {
            s += static_cast<char>(c);
            ++next_;
        } else {
            utf8(s);
        }
    }
}

void Cursor::enter(Kind kind) {
    expect(kind);
    if (depth_ == kMaxDepth) error(next_, "nested too deeply");
    keys_[depth_++] = nullptr;
    ++next_;
}

bool Cursor::leave(char bracket, bool first) {
    space();
    if (next_ == text_.size()) error(next_, std::string("'") + bracket + "' is missing where the text ends");
    if (text_[next_] == bracket) {
        ++next_;
        --depth_;
        return true;
    }
    if (!first) {
        if (text_[next_] != ',') error(next_, std::string("',' or '") + bracket + "' is missing");
        ++next_;
        space();
        if (next_ < text_.size() && text_[next_] == bracket) error(next_, "a comma stands before the end");
    }
    return false;
}

void Cursor::colon() {
    space();
    if (next_ == text_.size() || text_[next_] != ':') error(next_, "':' is missing after a key");
    ++next_;
}

void Cursor::skip() {
    switch (peek()) {
        case Kind::null: return null();
        case Kind::boolean: boolean(); return;
        case Kind::integer:
        case Kind::real: number(); return;
        case Kind::string: string(); return;
        case Kind::array: return array([&] { skip(); });
        case Kind::object: return object([&](const std::string&) { skip(); });
    }
}

void Cursor::end() {
    space();
    if (next_ != text_.size()) error(next_, "something follows the value");
}

const Value* Value::find(std::string_view key) const {
    for (const auto& [name, value] : object)
        if (name == key) return &value;
    return nullptr;
}

static Value read_value(Cursor& in) {  // as deep as the cursor lets it: kMaxDepth
    Value v;
    v.kind = in.peek();
    switch (v.kind) {
        case Kind::null: in.null(); break;
        case Kind::boolean: v.boolean = in.boolean(); break;
        case Kind::integer:
        case Kind::real: {
            const Cursor::Number n = in.number();
            v.kind = n.is_integer ? Kind::integer : Kind::real;
            v.integer = n.integer;
            v.real = n.real;
            break;
        }
        case Kind::string: v.string = in.string(); break;
        case Kind::array: in.array([&] { v.array.push_back(read_value(in)); }); break;
        case Kind::object: in.object([&](const std::string& key) { v.object.push_back({key, read_value(in)}); }); break;
    }
    return v;
}

Value parse(std::string_view text, const std::string& where) {
    Cursor in(text, where);
    Value v = read_value(in);
    in.end();
    return v;
}

}  // namespace kd::json
