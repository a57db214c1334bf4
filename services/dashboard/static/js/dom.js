// Nodes made from data. Data goes into the page as text, never as markup.

export const byId = (id) => document.getElementById(id);

export function element(tag, className, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children.filter((child) => child !== null && child !== undefined).map((child) => (child instanceof Node ? child : String(child))));
  return node;
}

/** A node of an SVG picture. */
export function drawing(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, String(value));
  node.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return node;
}

export const words = (name) => String(name).replaceAll("_", " ");
export const counted = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
